package logqueue

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// slow is a reader that takes as long for each write.
type slow struct {
	bytes.Buffer
	takes time.Duration
}

func (s *slow) Write(b []byte) (int, error) {
	time.Sleep(s.takes)
	return s.Buffer.Write(b)
}

// detached returns what writes to it and tells of lost lines.
func (s *slow) detached() *Writer {
	w := &Writer{To: s}
	w.Detach(func(lost int) { fmt.Fprintf(s, "lost %d\n", lost) })
	return w
}

func TestBeforeItIsDetachedItsCallerWaits(t *testing.T) {
	var out bytes.Buffer
	w := &Writer{To: &out}
	fmt.Fprint(w, "one\n")
	assert.Equal(t, "one\n", out.String())
	w.Flush()
}

func TestAReaderThatIsSlowMissesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := slow{takes: time.Millisecond}
		w, want := out.detached(), ""
		for i := range 5000 { // half as fast as they are read, and then ten times as fast
			line := fmt.Sprintf("line %d\n", i)
			want += line
			fmt.Fprint(w, line)
			if i < 1000 {
				time.Sleep(2 * time.Millisecond)
			} else {
				time.Sleep(100 * time.Microsecond)
			}
		}
		w.Flush()
		assert.Equal(t, want, out.String())
	})
}

func TestLinesOfManyKeepTheirOrder(t *testing.T) {
	var out slow
	w := out.detached()
	var all sync.WaitGroup
	for id := range 8 {
		all.Go(func() {
			for i := range 1000 {
				fmt.Fprintf(w, "%d %d\n", id, i)
			}
		})
	}
	all.Wait()
	w.Flush()
	next := map[int]int{}
	for line := range strings.Lines(out.String()) {
		var id, i int
		_, err := fmt.Sscanf(line, "%d %d\n", &id, &i)
		assert.NoError(t, err)
		assert.Equal(t, next[id], i)
		next[id]++
	}
	for id := range 8 {
		assert.Equal(t, 1000, next[id])
	}
}

func TestLinesThatFindNoRoomAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := slow{takes: time.Minute}
		w := out.detached()
		fmt.Fprint(w, "being written\n")
		synctest.Wait()
		large := strings.Repeat("x", room/4-1) + "\n"
		for range 7 {
			fmt.Fprint(w, large)
		}
		fmt.Fprint(w, "has room, but is behind others\n")
		time.Sleep(time.Hour)
		fmt.Fprint(w, "afterwards\n")
		synctest.Wait()
		fmt.Fprint(w, strings.Repeat(large, 5)) // never has room
		fmt.Fprint(w, "at the end\n")
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.Equal(t, "being written\n"+strings.Repeat(large, 4)+"lost 4\nafterwards\nlost 2\n", out.String())
	})
}

func TestTheEndDoesNotWaitLongForWhoDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nobody, end := io.Pipe()
		w := &Writer{To: end}
		w.Detach(func(int) {})
		began := time.Now()
		fmt.Fprint(w, "one\n")
		w.Flush()
		assert.Equal(t, patience, time.Since(began))
		assert.NoError(t, nobody.Close())
	})
}
