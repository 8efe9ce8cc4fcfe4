// Package logqueue writes a log in the background, so that a slow reader delays no connection. Lines that find no room
// are counted and never waited for.
package logqueue

import (
	"io"
	"sync"
	"time"
)

const (
	room     = 1 << 20     // bytes that may wait to be written
	patience = time.Second // of Flush
)

// Writer writes lines to To: before Detach in the call of Write, after Detach in the background.
type Writer struct {
	To io.Writer

	mu      sync.Mutex
	tell    func(lost int) // nil before Detach
	waiting []byte         // whole lines
	lost    int            // lines that found no room behind those that wait
	written chan struct{}  // closed once nothing waits and nothing is being written; nil then
}

// Detach makes Write return at once from now on. tell writes to To how many lines were lost.
func (w *Writer) Detach(tell func(lost int)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tell = tell
}

// Write implements io.Writer, for a line.
func (w *Writer) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.tell == nil {
		return w.To.Write(line)
	}
	if w.lost > 0 || len(w.waiting)+len(line) > room { // behind a line that is lost none waits: order is kept
		w.lost++
	} else {
		w.waiting = append(w.waiting, line...)
	}
	if w.written == nil {
		w.written = make(chan struct{})
		go w.writeWaiting(w.written)
	}
	return len(line), nil
}

// writeWaiting writes what waits until nothing does.
func (w *Writer) writeWaiting(written chan struct{}) {
	for {
		w.mu.Lock()
		lines, lost := w.waiting, w.lost
		w.waiting, w.lost = nil, 0
		if len(lines) == 0 && lost == 0 {
			w.written = nil
			close(written)
			w.mu.Unlock()
			return
		}
		w.mu.Unlock()
		_, _ = w.To.Write(lines) // an error has no other place to go
		if lost > 0 {
			w.tell(lost)
		}
	}
}

// Flush waits until all is written, but no longer than patience: a reader may have stopped.
func (w *Writer) Flush() {
	w.mu.Lock()
	written := w.written
	w.mu.Unlock()
	if written == nil {
		return
	}
	select {
	case <-written:
	case <-time.After(patience):
	}
}
