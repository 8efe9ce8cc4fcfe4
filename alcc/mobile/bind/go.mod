module github.com/penstock-net/penstock/alcc/mobile/bind

go 1.26.8

require (
	github.com/penstock-net/penstock v0.0.0
	github.com/stretchr/testify v1.12.1
	golang.org/x/mobile v0.0.0-20261011034528-197770444867
)

require (
	github.com/cilium/ebpf v0.22.0 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/mod v0.42.0 // indirect
	golang.org/x/sync v0.24.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/tools v0.52.0 // indirect
	gonum.org/v1/gonum v0.17.0 // indirect
)

replace github.com/penstock-net/penstock => ../../..

tool golang.org/x/mobile/cmd/gobind
