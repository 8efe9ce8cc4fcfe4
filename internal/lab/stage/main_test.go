package stage

import (
	"testing"

	"github.com/penstock-net/penstock/internal/lab/labtest"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// penstock is what stages are played with: the program under test.
func penstock(t *testing.T) Env {
	t.Helper()
	return Env{Executable: labtest.Penstock(t), Laboratory: labtest.Laboratory(t)}
}
