package telemetry

import (
	"bytes"
	"os"
	goruntime "runtime/metrics"
	"strconv"
	"syscall"
)

// What is told of the process, by the names that Prometheus's libraries have for it.
var (
	processCPU       = newMetric("counter", "process_cpu_seconds_total", "Processor time of the process.")
	processStart     = newMetric("gauge", "process_start_time_seconds", "When the process started, in Unix time.")
	processResident  = newMetric("gauge", "process_resident_memory_bytes", "Memory of the process that is in RAM.")
	processVirtual   = newMetric("gauge", "process_virtual_memory_bytes", "Address space of the process.")
	processOpenFiles = newMetric("gauge", "process_open_fds", "Descriptors that are open.")
	processMaxFiles  = newMetric("gauge", "process_max_fds", "Descriptors that may be open.")

	goInfo = newMetric("gauge", "go_info", "The version of Go that built the program; always 1.", "version")
	// By their names in runtime/metrics.
	goRuntime = map[string]*metric{
		"/sched/goroutines:goroutines": newMetric("gauge", "go_goroutines", "Goroutines."),
		"/sched/threads/total:threads": newMetric("gauge", "go_threads", "Threads of the operating system."),
		"/gc/cycles/total:gc-cycles":   newMetric("counter", "go_gc_cycles_total", "Collections of garbage."),
		"/gc/heap/goal:bytes": newMetric("gauge", "go_memstats_next_gc_bytes",
			"Heap at which the next collection begins."),
		"/gc/heap/allocs:bytes":              newMetric("counter", "go_memstats_alloc_bytes_total", "Bytes allocated."),
		"/memory/classes/heap/objects:bytes": newMetric("gauge", "go_memstats_alloc_bytes", "Bytes in objects."),
		"/memory/classes/total:bytes": newMetric("gauge", "go_memstats_sys_bytes",
			"Memory mapped by the runtime."),
	}
)

// writeProcess writes what this system tells.
func (s sink) writeProcess(f Facts) {
	var used syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &used) == nil {
		s.putSample(processCPU, float64(used.Utime.Nano()+used.Stime.Nano())/1e9)
	}
	s.putSample(processStart, f.Start)
	if statm, err := os.ReadFile("/proc/self/statm"); err == nil {
		for i, m := range []*metric{processVirtual, processResident} {
			pages, _ := strconv.ParseFloat(string(bytes.Fields(statm)[i]), 64)
			s.putSample(m, pages*float64(os.Getpagesize()))
		}
	}
	if dir, err := os.Open("/proc/self/fd"); err == nil {
		names, _ := dir.Readdirnames(-1)
		_ = dir.Close()
		s.putSample(processOpenFiles, float64(len(names)-1)) // without dir
	}
	var files syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files) == nil {
		s.putSample(processMaxFiles, float64(files.Cur))
	}

	s.putSample(goInfo, 1, f.GoVersion)
	for name, m := range goRuntime {
		value := []goruntime.Sample{{Name: name}}
		if goruntime.Read(value); value[0].Value.Kind() == goruntime.KindUint64 {
			s.putSample(m, float64(value[0].Value.Uint64()))
		}
	}
}
