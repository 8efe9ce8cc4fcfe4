package kernel

import "github.com/penstock-net/penstock/proxy/datapath"

// Drive has one loop serve both legs of a connection, without goroutines: it calls step
// whenever one of them may be read or written, once one is closed, and after post, which
// may be called from any goroutine. From then on only step may read and write, and it
// gets datapath.ErrWait where there is nothing to be done. ok: both are legs of this
// package with the same loop (DialConfig.Near).
func Drive(a, b datapath.Conn, step func()) (post func(), ok bool) {
	one, ok := a.(*Conn)
	if !ok {
		return nil, false
	}
	two, ok := b.(*Conn)
	if !ok || one.raw.Loop() != two.raw.Loop() {
		return nil, false
	}
	task := one.raw.Loop().Task(step)
	one.raw.Drive(task)
	two.raw.Drive(task)
	return task.Post, true
}
