// Creates jobs of all sizes with net/http, whole and in pieces: sizes URL TOKEN SIZE...
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
)

func main() {
	for _, argument := range os.Args[3:] {
		size, _ := strconv.Atoi(argument)
		job := `{"queue": "q", "payload": {"text": "` + strings.Repeat("x", size) + `"}}`
		pieces := io.MultiReader(strings.NewReader(job[:20]), strings.NewReader(job[20:])) // of no known length
		for _, body := range []io.Reader{strings.NewReader(job), pieces} {
			request, _ := http.NewRequest("POST", os.Args[1]+"/v1/jobs", body)
			request.Header.Set("Authorization", "Bearer "+os.Args[2])
			request.Header.Set("Content-Type", "application/json")
			answer, err := http.DefaultClient.Do(request)
			if err != nil {
				fmt.Println(err)
				continue
			}
			text, _ := io.ReadAll(answer.Body)
			fmt.Println(answer.StatusCode, strings.Contains(string(text), `"created":true`))
		}
	}
}
