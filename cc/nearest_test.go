package cc

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestNearest(t *testing.T) {
	words := []string{"penstock", "copa", "cubic", "pbe", "tun", "socks5", "ebpf", "up"}
	for word, nearest := range map[string]string{
		"pensotck": "penstock", "penstok": "penstock", "cop": "copa", "cuibc": "cubic", "sock5": "socks5", "ebfp": "ebpf",
		"pb": "pbe", "pu": "up", "tcp": "", "x": "", "": "", "quite another": "", "cubic": "cubic",
	} {
		assert.Equal(t, nearest, Nearest(word, words), word)
	}
	long := string(make([]byte, 100))
	assert.Empty(t, Nearest(long, []string{long}), "long words are not compared")
}

func TestUnknownNamesComeWithTheNearest(t *testing.T) {
	_, err := Lookup("pensotck")
	assert.ErrorContains(t, err, `no algorithm "pensotck"; did you mean penstock? There are bbr, `)
	_, err = Lookup("nosuch")
	assert.ErrorContains(t, err, `no algorithm "nosuch"; there are bbr, `)
	_, _, err = Parse("copa:dleta=0.1")
	assert.ErrorContains(t, err, `copa has no parameter "dleta"; it takes `)
	assert.ErrorContains(t, err, "; did you mean delta?")
}
