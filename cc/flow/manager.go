package flow

import (
	"errors"

	"github.com/penstock-net/penstock/cc"
)

// Manager keeps the macroflows. Its zero value is ready.
type Manager struct{}

// Open adds a flow to its macroflow. wake is called, from any goroutine and
// outside all locks, when a Take that was refused may now succeed; it must
// neither block nor call back.
func (m *Manager) Open(now cc.Time, t Terms, wake func()) (*Flow, error) {
	return nil, errors.New("flow: not built")
}

// Tick serves what time alone brings about: pacing credit and algorithms'
// own clocks. It returns when it wants to be called next; cc.Never: not before
// another call into the package.
func (m *Manager) Tick(now cc.Time) cc.Time { return cc.Never }

// Snapshots returns the state of every open flow, ordered by ID.
func (m *Manager) Snapshots() []Snapshot { return nil }
