#!/usr/bin/env bash
# A worker of pgworkd in bash, curl and jq: one job at a time. Handlers are at the end.
#
#   PGWORKD_URL=http://127.0.0.1:8080 PGWORKD_TOKEN=pgw_... PGWORKD_QUEUE=demo ./worker.sh
set -u
lease_s=${PGWORKD_LEASE_S:-30} worker='' secret='' child='' assignment='' renewed=0 stopping='' claims=0 dropped='' dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
trap 'stopping=1; [ -z "$asking" ] || kill "$asking" 2>/dev/null' TERM INT
asking=''

# call SECONDS METHOD PATH [BODY]: the answer in $dir/answer, its status in $status ("000": none arrived).
call() {
    local limit=$1 method=$2 path=$3
    printf '%s' "${4:-}" >"$dir/body"
    curl --silent --max-time "$limit" --request "$method" "$PGWORKD_URL$path" --output "$dir/answer" \
        --write-out '%{http_code}' --header "Authorization: Bearer $PGWORKD_TOKEN" \
        --header "Pgworkd-Secret: $secret" ${4+--header "Content-Type: application/json" --data-binary @"$dir/body"} \
        >"$dir/status" &
    asking=$!
    wait "$asking" # a signal interrupts this, not curl itself
    wait "$asking" 2>/dev/null
    asking=''
    status=$(cat "$dir/status" 2>/dev/null)
    status=${status:-000}
    case $status in
    401 | 403)
        echo "the token is refused: $status" >&2
        [ -z "$child" ] || kill -KILL -- "-$child" 2>/dev/null
        exit 1
        ;;
    esac
}

# now: seconds on a clock that nobody sets.
now() { cut -d. -f1 /proc/uptime; }

register() {
    secret='' assignment='' dropped=''
    until [ -n "$stopping" ]; do
        local sent
        sent=$(now)
        call 10 POST /v1/workers "$(jq -nc --arg name "$(hostname)" --arg queue "$PGWORKD_QUEUE" --argjson lease "$lease_s" \
            '{name: $name, lease_s: $lease, queues: {($queue): 1}}')"
        if [ "$status" = 201 ]; then
            worker=$(jq -r .worker "$dir/answer") secret=$(jq -r .secret "$dir/answer") renewed=$sent
            return
        fi
        echo "register: $status" >&2
        sleep 1
    done
}

# beat: renews the lease. What the claims up to this number took, and the list does not have, is taken back; so what was
# stopped because the lease might end, and has begun, is in one more list that is answered.
beat() {
    local sent
    sent=$(now)
    call 5 POST "/v1/workers/$worker/beat" "$(jq -nc --arg held "$assignment" \
        --arg dropped "$dropped" --argjson claims "$claims" \
        '{assignments: [$held, $dropped | select(. != "")], claim_id: (if $claims > 0 then $claims else null end)}')"
    case $status in
    200)
        renewed=$sent
        [ "$(jq -r .listed "$dir/answer")" != true ] || dropped=''
        state=$(jq -r .state "$dir/answer")
        if [ -n "$assignment" ]; then
            if jq -e --arg held "$assignment" '.gone | index($held)' "$dir/answer" >/dev/null; then
                abandon
            elif jq -e --arg held "$assignment" '.cancel | index($held)' "$dir/answer" >/dev/null; then
                abandon cancelled
            fi
        fi
        ;;
    410) abandon lost ;;
    esac
}

# abandon [WHY]: stops the run. After "cancelled" it is given back, which ends the job; else it is not ours to settle:
# "late", the lease may end; "gone" or "lost", others have it.
abandon() {
    [ -z "$child" ] || kill -KILL -- "-$child" 2>/dev/null
    ended=${1:-gone}
}

# settle HOW BODY: until there is an answer. The same may be sent any number of times.
settle() {
    while [ $(($(now) - renewed)) -lt "$lease_s" ]; do
        call 10 POST "/v1/assignments/$assignment/$1" "$2"
        case $status in
        000 | 429 | 5*) sleep 0.5 ;;
        409 | 410) return ;; # another worker's by now
        413 | 422) # what it returned cannot be stored
            if [ "$1" = complete ]; then
                settle fail "$(jq -c '{type: "Unstorable", message: .detail}' "$dir/answer")"
            fi
            return
            ;;
        *) return ;;
        esac
    done
    dropped=$assignment
}

run() {
    local kind body
    kind=$(jq -r '.assignments[0].job.kind' "$dir/claimed")
    jq -c '.assignments[0].job.payload' "$dir/claimed" >"$dir/payload"
    ended=''
    set -m # the handler in a process group of its own, which can be stopped as a whole
    handle "$kind" <"$dir/payload" >"$dir/result" 2>"$dir/error" &
    child=$!
    set +m
    while kill -0 "$child" 2>/dev/null; do
        # Without an answer for most of the lease, it must stop: others may be given the job soon.
        [ $(($(now) - renewed)) -lt $((lease_s - 3)) ] || abandon late
        [ $(($(now) - renewed)) -lt $((lease_s / 4)) ] || beat
        [ -n "$ended" ] || sleep 0.2
    done
    wait "$child" 2>/dev/null
    local code=$?
    child=''
    if [ "$ended" = cancelled ]; then
        settle release '{}'
    elif [ -z "$ended" ] && [ "$code" = 0 ]; then
        jq -sc '{result: .[0]}' "$dir/result" >"$dir/done"
        body=$(cat "$dir/done")
        settle complete "$body"
    elif [ -z "$ended" ]; then
        body=$(jq -Rsc --argjson retryable "$([ "$code" = 100 ] && echo false || echo true)" \
            '{type: "Failed", message: ., retryable: $retryable, retry_in_s: 1}' "$dir/error")
        settle fail "$body"
    elif [ "$ended" = late ]; then
        dropped=$assignment
    fi
    assignment=''
}

work() {
    register
    state=run
    while [ -z "$stopping" ] && [ "$state" != stop ]; do
        [ $(($(now) - renewed)) -lt "$lease_s" ] || register
        if [ "$state" = quiet ]; then
            sleep 1
            beat
            continue
        fi
        claims=$((claims + 1))
        call $((lease_s / 4 + 10)) POST /v1/claims "$(jq -nc --argjson worker "$worker" --arg queue "$PGWORKD_QUEUE" \
            --argjson wait "$((lease_s / 4))" --argjson claim "$claims" \
            '{worker: $worker, queues: [$queue], claim_id: $claim, max: 1, wait_s: $wait}')"
        case $status in
        200)
            cp "$dir/answer" "$dir/claimed"
            assignment=$(jq -r '.assignments[0].assignment // ""' "$dir/claimed")
            state=$(jq -r .state "$dir/claimed")
            if [ -n "$assignment" ] && [ $(($(now) - renewed)) -lt $((lease_s - 3)) ]; then
                run
            fi
            assignment='' # what has not begun is in no list, and goes back
            beat
            ;;
        410) register ;;
        *)
            sleep 1
            beat
            ;;
        esac
        [ "$status" != 410 ] || register
    done
    local known=''
    # Whatever has begun was settled, or is in a list.
    [ -n "$dropped" ] || [ "$claims" = 0 ] || known="?claim_id=$claims"
    call 10 DELETE "/v1/workers/$worker$known"
}

# Handlers: the payload on standard input, the result (JSON) on standard output. Exit code 100: do not retry.
handle() {
    case $1 in
    echo) cat ;;
    add) jq -c '{sum: (.a + .b)}' ;;
    fail) jq -r .message >&2; exit 1 ;;
    fail_for_good) jq -r .message >&2; exit 100 ;;
    tick) # a line every 100 ms, so that anyone sees whether it runs
        payload=$(cat) file=$(jq -r .file <<<"$payload")
        for _ in $(seq "$(jq -r '.seconds * 10 | floor' <<<"$payload")"); do
            echo "$(cut -d' ' -f1 /proc/uptime) $$" >>"$file"
            sleep 0.1
        done
        echo '"ticked"'
        ;;
    *) echo "no handler for kind $1" >&2; exit 1 ;;
    esac
}

work
