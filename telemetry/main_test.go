package telemetry

import (
	"os"
	"testing"

	"github.com/penstock-net/penstock/internal/need"
)

func TestMain(m *testing.M) { os.Exit(need.Run(m)) }
