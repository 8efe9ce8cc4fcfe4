package caps

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"golang.org/x/sys/unix"
)

func TestCapabilitiesHaveTheKernelsNames(t *testing.T) {
	assert.Equal(t, "CAP_CHECKPOINT_RESTORE", (All &^ (All >> 1)).String(), "the last one that the kernel has")
	assert.Equal(t, "CAP_NET_BIND_SERVICE CAP_NET_ADMIN CAP_NET_RAW", (NetBindService | NetAdmin | NetRaw).String())
	assert.Equal(t, "CAP_SYS_ADMIN CAP_BPF", (SysAdmin | BPF).String())
	assert.Equal(t, "CAP_CHECKPOINT_RESTORE capability 41", Set(1<<unix.CAP_CHECKPOINT_RESTORE|1<<41).String())
	assert.Empty(t, Set(0).String())
}
