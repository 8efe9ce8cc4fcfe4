package bench

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
)

func TestPrinter(t *testing.T) {
	var plain, terminal bytes.Buffer
	p := NewPrinter(&plain)
	p.Line("bench 1/2: cubic: 2 s", false)
	p.Line("bench 1/2: cubic", true)
	p.Break()
	assert.Equal(t, "bench 1/2: cubic\n", plain.String())

	p = &Printer{w: &terminal, columns: func() int { return 0 }}
	p.Line("bench 1/2: cubic: 2 s", false)
	assert.Equal(t, "\r\x1b[Kbench 1/2: cubic: 2 s", terminal.String())
	p.Break()
	assert.True(t, strings.HasSuffix(terminal.String(), "s\n"), "what follows begins on a line of its own")
}

func TestLinesFitTheTerminal(t *testing.T) {
	line := "[1/9] static:cwnd_packets=22@cubic on Verizon-LTE-short.down, buffer 250pkt: 10 of 30 s, 10.00 " +
		"Mbit/s, queueing 1000 ms"
	assert.Equal(t, line, fit(line, 0), "the width is not known")
	assert.Equal(t, line, fit(line, 200))
	assert.Equal(t, "[1/9] static:cwnd_packets=22@cubic … 10 of 30 s, 10.00 Mbit/s, queueing 1000 ms", fit(line, 80))
	for columns := 1; columns < 130; columns++ {
		assert.Less(t, utf8.RuneCountInString(fit(line, columns)), max(columns, 2))
	}
}
