package kernel

import (
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

// Drive has one loop serve both legs of a connection, without goroutines, from the first call of
// post on. The loop calls step after each post, whenever a leg may be read or written, and once one
// is closed. Only step may read and write then, and gets datapath.ErrWait where it would have to
// wait. Any goroutine may call post. ok: both are legs of this package with the same loop
// (DialConfig.Near).
func Drive(a, b datapath.Conn, step func()) (post func(), ok bool) {
	one, ok := a.(*Conn)
	if !ok {
		return nil, false
	}
	two, ok := b.(*Conn)
	if !ok || one.raw.Loop() != two.raw.Loop() {
		return nil, false
	}
	var task *eventloop.Task
	task = one.raw.Loop().Task(func() {
		if !one.raw.Driven() { // on the loop, so that no event comes between the two
			one.raw.Drive(task)
			two.raw.Drive(task)
		}
		step()
	})
	return task.Post, true
}
