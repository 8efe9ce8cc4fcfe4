package alcc_test

import (
	"fmt"
	"io"
	"log"
	"net"
	"net/http"

	"github.com/penstock-net/penstock/alcc"
)

// A server of HTTP controls what its clients download.
func ExampleNewListener() {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	ln, err = alcc.NewListener(ln, alcc.Options{Algorithm: "copa"})
	if err != nil {
		log.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "hello")
	})}
	go server.Serve(ln) //nolint:errcheck // it ends with Close
	defer server.Close()

	r, err := http.Get("http://" + ln.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	defer r.Body.Close()
	body, _ := io.ReadAll(r.Body)
	fmt.Println(string(body))
	// Output: hello
}

// A client of HTTP controls what it uploads.
func ExampleDialer() {
	dialer := &alcc.Dialer{Options: alcc.Options{Algorithm: "penstock", MaxRate: 20e6}}
	client := &http.Client{Transport: &http.Transport{DialContext: dialer.DialContext}}
	_ = client
}
