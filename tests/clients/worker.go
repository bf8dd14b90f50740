// A worker of pgworkd in Go, with the standard library alone. Handlers are at the end.
//
//	PGWORKD_URL=http://127.0.0.1:8080 PGWORKD_TOKEN=pgw_... PGWORKD_QUEUE=demo go run worker.go
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"
)

type job struct {
	ID      string          `json:"id"`
	Kind    string          `json:"kind"`
	Payload json.RawMessage `json:"payload"`
	Attempt int             `json:"attempt"`
}

type assigned struct {
	Assignment string `json:"assignment"`
	Job        job    `json:"job"`
}

// told is what the answers of claims and beats say that the worker is to do.
type told struct {
	State       string     `json:"state"`
	Cancel      []string   `json:"cancel"`
	Gone        []string   `json:"gone"`
	Listed      bool       `json:"listed"`
	Assignments []assigned `json:"assignments"`
}

// errPermanent is returned by a handler: a retry would not help.
var errPermanent = errors.New("permanent")

// errCancelled and errGone are why a run is stopped: given back, or not ours to settle any more.
var errCancelled, errGone = errors.New("cancelled"), errors.New("gone")

type run struct {
	stop context.CancelFunc
	why  error
}

type worker struct {
	url, token, queue string
	slots             int
	lease, margin     time.Duration

	mu        sync.Mutex
	id        int
	secret    string
	renewedAt time.Time // when the last beat that was answered was sent; Go counts it by the monotonic clock
	state     string
	stopping  bool
	claims    int                // how many were sent: the number of the last one
	read      int                // the last one whose answer was read, or given up
	held      map[string]*run    // what it holds, each until its settle was answered
	dropped   map[string]bool    // stopped because the lease might end; begun, so one more list that is answered has it
	claiming  context.CancelFunc // ends the long poll
	freed     chan struct{}
}

// call returns the status and the body of an answer; status 0: there was none.
func (w *worker) call(ctx context.Context, limit time.Duration, method, path string, body, into any) int {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	sent, err := json.Marshal(body)
	if err != nil {
		log.Print("encode: ", err)
		return 422
	}
	request, err := http.NewRequestWithContext(ctx, method, w.url+path, bytes.NewReader(sent))
	if err != nil {
		return 0
	}
	w.mu.Lock()
	request.Header.Set("Pgworkd-Secret", w.secret)
	w.mu.Unlock()
	request.Header.Set("Authorization", "Bearer "+w.token)
	request.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0
	}
	defer answer.Body.Close()
	if answer.StatusCode == 401 || answer.StatusCode == 403 {
		log.Fatal("the token is refused: ", answer.Status)
	}
	if into != nil && json.NewDecoder(answer.Body).Decode(into) != nil {
		return 0
	}
	return answer.StatusCode
}

func (w *worker) register() {
	name, _ := os.Hostname()
	body := map[string]any{"name": name, "queues": map[string]int{w.queue: w.slots}, "lease_s": w.lease.Seconds()}
	for !w.isStopping() {
		sentAt := time.Now()
		var made struct {
			Worker int    `json:"worker"`
			Secret string `json:"secret"`
			Detail string `json:"detail"`
		}
		status := w.call(context.Background(), 10*time.Second, "POST", "/v1/workers", body, &made)
		if status == 201 {
			w.mu.Lock()
			w.id, w.secret, w.renewedAt, w.state = made.Worker, made.Secret, sentAt, "run"
			w.mu.Unlock()
			return
		}
		log.Print("register: ", status, " ", made.Detail)
		time.Sleep(time.Second)
	}
}

// abandonAll stops everything that runs: others may be given it soon, or have it. Nothing of it is settled.
func (w *worker) abandonAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for assignment, run := range w.held {
		run.why = errGone
		run.stop()
		delete(w.held, assignment)
		w.dropped[assignment] = true
	}
}

// beatForEver renews the lease, a few times per lease, and does what the answer says.
func (w *worker) beatForEver() {
	for {
		time.Sleep(w.lease / 6)
		if !w.leased() {
			w.abandonAll()
		}
		w.mu.Lock()
		list := make([]string, 0, len(w.held)+len(w.dropped))
		for assignment := range w.held {
			list = append(list, assignment)
		}
		for assignment := range w.dropped {
			list = append(list, assignment)
		}
		path, body := fmt.Sprintf("/v1/workers/%d/beat", w.id), map[string]any{"assignments": list}
		if w.read > 0 {
			body["claim_id"] = w.read
		}
		w.mu.Unlock()
		sentAt := time.Now()
		var answer told
		switch w.call(context.Background(), w.lease/4, "POST", path, body, &answer) {
		case 200:
			w.mu.Lock()
			w.renewedAt = sentAt
			for _, assignment := range list {
				if answer.Listed {
					delete(w.dropped, assignment)
				}
			}
			w.mu.Unlock()
			w.obey(answer)
		case 410:
			w.abandonAll()
			w.mu.Lock()
			w.dropped = map[string]bool{}
			w.mu.Unlock()
			w.register()
		}
	}
}

func (w *worker) obey(answer told) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.state = answer.State
	for _, assignment := range answer.Cancel {
		if run := w.held[assignment]; run != nil {
			run.why = errCancelled
			run.stop()
		}
	}
	for _, assignment := range answer.Gone {
		if run := w.held[assignment]; run != nil {
			run.why = errGone
			run.stop()
			delete(w.held, assignment)
		}
	}
	if w.state == "stop" {
		w.stopping = true
	}
}

// start begins a run, which holds its slot from now on.
func (w *worker) start(each assigned) {
	ctx, cancel := context.WithCancel(context.Background())
	this := &run{stop: cancel}
	w.mu.Lock()
	w.held[each.Assignment] = this
	w.mu.Unlock()
	go w.run(ctx, each, this)
}

func (w *worker) run(ctx context.Context, each assigned, this *run) {
	defer this.stop()
	result, err := handled(ctx, each.Job)
	w.mu.Lock()
	why := this.why
	w.mu.Unlock()
	switch {
	case err == nil:
		w.settle(each.Assignment, "complete", map[string]any{"result": result})
	case why == errCancelled:
		w.settle(each.Assignment, "release", map[string]any{})
	default:
		retryable := !errors.Is(err, errPermanent)
		fault := map[string]any{"message": err.Error(), "retryable": retryable, "retry_in_s": 1}
		w.settle(each.Assignment, "fail", fault)
	}
	w.mu.Lock()
	if w.held[each.Assignment] == this {
		delete(w.held, each.Assignment)
	}
	w.mu.Unlock()
	select {
	case w.freed <- struct{}{}:
	default:
	}
}

// handled turns a panic of a handler into an error.
func handled(ctx context.Context, job job) (result any, err error) {
	defer func() {
		if fault := recover(); fault != nil {
			err = fmt.Errorf("panic: %v", fault)
		}
	}()
	handler := handlers[job.Kind]
	if handler == nil {
		return nil, fmt.Errorf("no handler for kind %s", job.Kind)
	}
	return handler(ctx, job.Payload)
}

// settle sends the same until there is an answer; it may be repeated any number of times.
func (w *worker) settle(assignment, how string, body any) {
	for pause := 100 * time.Millisecond; w.holds(assignment); pause *= 2 {
		var answer struct {
			Detail string `json:"detail"`
		}
		status := w.call(context.Background(), 10*time.Second, "POST", "/v1/assignments/"+assignment+"/"+how, body, &answer)
		if (status == 413 || status == 422) && how == "complete" { // what the handler returned cannot be stored
			w.settle(assignment, "fail", map[string]any{"type": "Unstorable", "message": answer.Detail})
			return
		}
		if status != 0 && status != 429 && status < 500 {
			return // also 409: another worker has the job by now
		}
		if pause > 2*time.Second {
			pause = 2 * time.Second
		}
		time.Sleep(pause)
	}
}

func (w *worker) holds(assignment string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.held[assignment] != nil
}

func (w *worker) isStopping() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stopping
}

func (w *worker) leased() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Since(w.renewedAt) < w.lease-w.margin
}

func (w *worker) is(id int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.id == id
}

func (w *worker) wait(limit time.Duration) {
	select {
	case <-w.freed:
	case <-time.After(limit):
	}
}

func (w *worker) work() {
	w.register()
	go w.beatForEver()
	for !w.isStopping() {
		w.mu.Lock()
		free, ready := w.slots-len(w.held), w.state == "run" && time.Since(w.renewedAt) < w.lease-w.margin
		ctx, cancel := context.WithCancel(context.Background())
		w.claiming = cancel
		if free == 0 || !ready {
			w.mu.Unlock()
			cancel()
			w.wait(time.Second)
			continue
		}
		w.claims++
		claimer := w.id
		body := map[string]any{"worker": w.id, "queues": []string{w.queue}, "claim_id": w.claims, "max": free, "wait_s": 20}
		w.mu.Unlock()
		var answer told
		status := w.call(ctx, 40*time.Second, "POST", "/v1/claims", body, &answer)
		cancel()
		if status == 200 {
			// Else they are in no list, and go back; or the worker was presumed dead meanwhile, and others have them.
			if w.leased() && w.is(claimer) {
				for _, each := range answer.Assignments {
					w.start(each)
				}
			}
			w.obey(answer)
		}
		w.mu.Lock()
		w.read = w.claims
		w.mu.Unlock()
		if status == 200 {
			continue
		} else if !w.isStopping() {
			time.Sleep(500 * time.Millisecond) // 410: the next beat registers again
		}
	}
	for w.busy() {
		w.wait(time.Second)
	}
	path := fmt.Sprintf("/v1/workers/%d", w.id)
	w.mu.Lock()
	if w.claims > 0 && len(w.dropped) == 0 { // whatever has begun was settled, or is in a list
		path += fmt.Sprintf("?claim_id=%d", w.claims)
	}
	w.mu.Unlock()
	w.call(context.Background(), 10*time.Second, "DELETE", path, nil, nil)
}

func (w *worker) busy() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.held) > 0
}

func number(name string, otherwise float64) float64 {
	if found, err := strconv.ParseFloat(os.Getenv(name), 64); err == nil {
		return found
	}
	return otherwise
}

func main() {
	lease := time.Duration(number("PGWORKD_LEASE_S", 30) * float64(time.Second))
	w := &worker{
		url: os.Getenv("PGWORKD_URL"), token: os.Getenv("PGWORKD_TOKEN"), queue: os.Getenv("PGWORKD_QUEUE"),
		slots: int(number("PGWORKD_SLOTS", 4)), lease: lease, margin: lease / 10,
		held: map[string]*run{}, dropped: map[string]bool{}, freed: make(chan struct{}, 1),
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-signals
		w.mu.Lock()
		defer w.mu.Unlock()
		w.stopping = true
		if w.claiming != nil {
			w.claiming()
		}
	}()
	w.work()
}

// Handlers by kind: a payload in, a result out. ctx is cancelled when the run must stop.
var handlers = map[string]func(ctx context.Context, payload json.RawMessage) (any, error){
	"echo": func(_ context.Context, payload json.RawMessage) (any, error) { return payload, nil },
	"add": func(_ context.Context, payload json.RawMessage) (any, error) {
		var of struct{ A, B float64 }
		if err := json.Unmarshal(payload, &of); err != nil {
			return nil, err
		}
		return map[string]float64{"sum": of.A + of.B}, nil
	},
	"fail": func(_ context.Context, payload json.RawMessage) (any, error) {
		return nil, errors.New(message(payload))
	},
	"fail_for_good": func(_ context.Context, payload json.RawMessage) (any, error) {
		return nil, fmt.Errorf("%w: %s", errPermanent, message(payload))
	},
	"tick": func(ctx context.Context, payload json.RawMessage) (any, error) {
		var of struct {
			File    string
			Seconds float64
		}
		if err := json.Unmarshal(payload, &of); err != nil {
			return nil, err
		}
		file, err := os.OpenFile(of.File, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return nil, err
		}
		defer file.Close()
		for left := int(of.Seconds * 10); left > 0; left-- {
			fmt.Fprintln(file, os.Getpid())
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(100 * time.Millisecond):
			}
		}
		return "ticked", nil
	},
}

func message(payload json.RawMessage) string {
	var of struct{ Message string }
	_ = json.Unmarshal(payload, &of)
	return of.Message
}
