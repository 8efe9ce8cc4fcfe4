# Everything anyone runs here, CI included, is a target of this file. It needs
# Go and make; what else a target can use (a C compiler for the race detector,
# root or user namespaces for the end-to-end tests) it says when it is missing.

GO            ?= go
GOLANGCI_LINT ?= golangci-lint
GOLANGCI_LINT_VERSION = v2.15.0

GOTESTSUM ?= $(GO) run gotest.tools/gotestsum@v1.13.0

# Tests of these packages drive a kernel and its sockets in real time. They run apart from those that only compute.
REAL_TIME = ./alcc ./cmd/... ./internal/lab/... ./internal/netlab ./proxy/... ./telemetry/... ./test/browser
# These packages, and the end-to-end tests, have tests over emulated links. A machine that others share may stand
# still for longer than such a link allows for: a test over one that fails is run again, up to twice, and counts when it
# fails each time; a table at the end names it. A data race counts at once. Every other test that fails once is a
# failure, in these packages too: test/reruns/check.sh finds those that were run again.
LINKS = ./cmd/penstock-lab ./internal/lab/stage ./internal/netlab
RERUN = --rerun-fails=2 --rerun-fails-max-failures=12 --rerun-fails-abort-on-data-race
# run-links runs gotestsum with the arguments $(1), and tests over emulated links again.
define run-links
	@set -e; dir=$$(mktemp -d); trap 'rm -r "$$dir"' EXIT; set -x; \
	$(GOTESTSUM) $(RERUN) --rerun-fails-report="$$dir/again" --jsonfile="$$dir/output" $(1); \
	test/reruns/check.sh "$$dir/again" "$$dir/output"
endef

# Property tests draw the same cases in each run of make, so that what passes here passes
# in CI; go test by itself, or RAPID_SEED=0, draws others. What one fails with is printed,
# not left in the tree.
export RAPID_SEED ?= 1
export RAPID_NOFAILFILE = true

# What the source is, or leads to. A commit that has not that tag has its number behind a +.
RELEASE  = $(shell cat internal/cli/VERSION)
TAGGED   = $(shell git describe --tags --exact-match --match 'v$(RELEASE)' --dirty 2>/dev/null)
VERSION ?= $(RELEASE)$(if $(filter v$(RELEASE),$(TAGGED)),,$(shell \
	commit=$$(git describe --always --exclude '*' --dirty 2>/dev/null) && echo +$$commit || echo -devel))
MODULE   = github.com/penstock-net/penstock
LDFLAGS  = -s -w -X $(MODULE)/internal/cli.version=$(VERSION)

# Packages that only compute, in virtual time or none: their tests need no root, no network and no real time.
PURE = ./agents/... ./cc/... ./internal/cli ./internal/lab/figures ./internal/lab/output \
	./internal/lab/record ./internal/lab/recipe ./internal/lab/report ./proxy/access ./proxy/config ./proxy/datapath \
	./proxy/happyeyeballs ./proxy/policy ./telemetry/page ./test/layout ./test/scenarios
# Packages with goroutines. Of cc/flow, which has none but is called from several, its tests of just that run.
RACED       = ./alcc ./cmd/penstock ./internal/lab/agents ./internal/lab/edge ./internal/lab/native ./internal/logqueue \
	./proxy ./proxy/agent ./proxy/datapath/... ./proxy/happyeyeballs ./proxy/ingress ./proxy/linkstat \
	./proxy/tunnel/... ./telemetry
RACED_LINKS = ./internal/lab/stage ./internal/netlab
RACED_FLOW  = MayRunAtOnce|AnyGoroutine
# All but the end-to-end tests, which run by themselves so that nothing beside
# them takes the processor that they measure on.
UNIT     = ./...
# packages lists those of $(1) that are neither in $(2) nor end-to-end tests.
packages = $(shell $(GO) list $(1) | grep -vxF -e "$$($(GO) list ./test/e2e/... $(2))")
FUZZTIME ?= 10s
BENCH    ?= .
TIMEOUT   = 30m
BIN      ?= bin
BPF       = proxy/datapath/kernel/bpf
# The other word size, which is that of routers, and the other processor of servers;
# ingress and the lab, so the command too, are for Linux.
CROSS     = linux/arm64 linux/mipsle darwin/arm64

# Tests on other processors. Under qemu-user those are left out that need of the kernel what qemu does not
# pass on: TCP_INFO (a real proxy), netlink, running a program of this machine.
# Experiments over simulated links, and what else is long, would take hours.
EMULATED ?= arm64
EMULATED_PACKAGES = ./cc/... ./proxy/access ./proxy/agent ./proxy/config ./proxy/datapath ./proxy/ingress \
	./proxy/linkstat ./proxy/policy ./internal/lab/linktrace ./internal/lab/record ./telemetry/...
EMULATED_WITHOUT  = cc/*_link_test.go cc/lying_hint_test.go cc/sprout_model_test.go cc/ccp/libccp_test.go \
	$(addprefix cc/flow/,bench_test.go paced_test.go path_test.go restart_test.go) \
	$(addprefix cc/sim/,datagrams_test.go generate_test.go hosts_test.go maxrate_test.go oneway_test.go upload_test.go) \
	proxy/ingress/listener_test.go proxy/linkstat/source_test.go telemetry/proxy_test.go

# Releases: the same commit gives the same bytes.
DIST      = dist
NFPM     ?= $(GO) run github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.0
ARCHS     = amd64 arm64 arm mipsle
# Those of routers have the build for routers: without a network stack of its own and QUIC.
ROUTERS   = arm mipsle
# Those that have the laboratory's package.
LABS      = amd64 arm64
ROUTER    = -tags nonetstack
PROGRAM   = -trimpath -ldflags '$(LDFLAGS)'
DATE     ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
# What sorts before the release that it leads to, unless it is that.
PACKAGE_VERSION ?= $(RELEASE)$(if $(filter v$(RELEASE),$(TAGGED)),,$(shell \
	git log -1 --date=format:%Y%m%d%H%M --format=~git%cd.%h 2>/dev/null || echo '~devel'))

.DEFAULT_GOAL = all
# Those that recipes start are penstock-agent-NAME.
AGENTS = $(notdir $(patsubst %/,%,$(dir $(wildcard agents/go/*/main.go))))

.PHONY: all build penstock penstock-lab penstock-relay agents penstock-router lint lint-tool check test test-unit test-tool test-race raced test-e2e test-modules bare-test newcomer-test fuzz fuzz-nightly bench bounds golden docs pictures measurements bpf bpf-check cross emulated-test demo dist packages image release manifests package-test kubernetes-test clean

.NOTPARALLEL: # the go command is by itself, and end-to-end tests measure

all: build lint test ## build, lint and test

build: penstock penstock-lab penstock-relay agents ## bin/penstock, -lab, -relay and agents, static (elsewhere: BIN)

penstock penstock-lab penstock-relay:
	CGO_ENABLED=0 $(GO) build $(PROGRAM) -o $(BIN)/$@ ./cmd/$@

agents:
	@set -e; for agent in $(AGENTS); do CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' \
		-o $(BIN)/penstock-agent-$$agent ./agents/go/$$agent; done

penstock-router: ## bin/penstock-router, smaller: without tunnels that end in the program, and QUIC
	CGO_ENABLED=0 $(GO) build $(ROUTER) $(PROGRAM) -o $(BIN)/$@ ./cmd/penstock

lint: bpf-check ## bpf-check and golangci-lint; gofmt and go vet where that is not installed
	@if command -v $(GOLANGCI_LINT) >/dev/null; then \
		echo $(GOLANGCI_LINT) run ./...; $(GOLANGCI_LINT) run ./...; \
	else \
		echo "lint: $(GOLANGCI_LINT) is not installed, so only gofmt and go vet run; for the rest:"; \
		echo "  make lint-tool"; \
		unformatted=$$(gofmt -l .); \
		if [ -n "$$unformatted" ]; then echo "lint: not formatted:"; echo "$$unformatted"; exit 1; fi; \
		$(GO) vet ./...; \
	fi

lint-tool: ## install golangci-lint at the version that CI has
	$(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION)

check: ## what to run after each change: format, vet, names and imports, tests that only compute; within three minutes
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then \
		echo "check: not formatted:"; echo "$$unformatted"; exit 1; fi
	$(GO) vet ./...
	$(GO) test -short -vet=off $(PURE)

test: test-unit test-race test-e2e test-modules ## everything that can be checked without judging it

test-unit: ## unit and property tests, scenarios, fuzz corpora
	$(GOTESTSUM) --format pkgname-and-test-fails --packages "$(call packages,$(UNIT),$(REAL_TIME))" -- -timeout $(TIMEOUT)
	$(GOTESTSUM) --format pkgname-and-test-fails --packages "$(call packages,$(REAL_TIME),$(LINKS))" -- -timeout $(TIMEOUT)
	$(call run-links,--format pkgname-and-test-fails --packages "$(LINKS)" -- -timeout $(TIMEOUT))

test-tool: # fetches and builds what runs the tests
	$(GOTESTSUM) --version

bare-test: ## make test in a bare Debian 12, as root and as a user; as root, with debootstrap
	test/bare/run.sh

newcomer-test: ## from a clone in a bare Debian 12 to what a managed download gains, within five minutes; as root
	AS=root test/bare/run.sh test/bare/newcomer.sh

test-race: ## packages with goroutines under the race detector
	@if [ "$$($(GO) env CGO_ENABLED)" = 1 ] && command -v $$($(GO) env CC) >/dev/null; then \
		$(MAKE) --no-print-directory raced; \
	else \
		echo "test-race: SKIPPED: the race detector needs a C compiler (CC=$$($(GO) env CC)," \
			"CGO_ENABLED=$$($(GO) env CGO_ENABLED)); install gcc"; \
	fi

# Property tests draw few cases here: test-unit draws them all.
raced: export RAPID_CHECKS = 5
raced: # with a C compiler
	$(GO) test -race -run '$(RACED_FLOW)' ./cc/flow
	$(GOTESTSUM) --format pkgname-and-test-fails --packages "$(RACED)" -- -race -short -timeout $(TIMEOUT)
	$(call run-links,--format pkgname-and-test-fails --packages "$(RACED_LINKS)" -- -race -timeout $(TIMEOUT))

# test/e2e in full over the first tier, and a smoke set over the others (one tier, in full:
# PENSTOCK_E2E_TIER=ebpf, bbr or unprivileged; PENSTOCK_E2E_SOAK=10m: the mix of loads lasts 10 minutes, not 20 s),
# then other people's programs, once. Tests that mostly wait run four at a time.
test-e2e: ## real clients and servers in network namespaces; as root or with user namespaces
	$(call run-links,--format standard-verbose --packages ./test/e2e/... -- -count=1 -p 1 -parallel 4 -timeout $(TIMEOUT))

test-modules: ## what is a module of its own: the listener wrapper for Caddy, and a program in Java as on phones
	@set -e; for module in alcc/caddy alcc/mobile/bind; do cd $(CURDIR)/$$module; \
		if $(GO) mod download; then $(GO) test -timeout $(TIMEOUT) ./...; \
		else echo "test-modules: SKIPPED: the modules of $$module cannot be had"; fi; done

# A target that fails does not keep the others from their turn.
fuzz: ## every fuzz target for FUZZTIME each
	@set -e; failed=; for pkg in $$($(GO) list ./...); do \
		list=$$($(GO) test -list '^Fuzz' $$pkg); \
		for target in $$(echo "$$list" | grep '^Fuzz' || true); do \
			echo "fuzz $$pkg $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 20x $$pkg \
				|| failed="$$failed $$pkg.$$target"; \
		done; \
	done; \
	if [ -n "$$failed" ]; then \
		echo "fuzz: FAILED:$$failed"; echo "fuzz: each input is in testdata/fuzz; commit it with its repair"; exit 1; \
	fi

fuzz-nightly: FUZZTIME = 10m
fuzz-nightly: fuzz ## every fuzz target for ten minutes: some hours

bench: ## benchmarks that match BENCH
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem -timeout 30m ./...

bounds: ## what the default algorithm must do, and what it does, in virtual time; two minutes
	nice $(GO) test ./cc -run '^$$' -bench Bounds -benchtime 1x -timeout 60m
	nice $(GO) run ./cmd/penstock-lab bench recipe latecomer --virtual

golden: ## rewrite the golden files of the scenarios; review the difference
	$(GO) test ./test/scenarios/... -update

docs: ## rewrite the pages that are generated
	$(GO) run ./cmd/penstock algorithms --markdown > docs/algorithms.md.new
	mv docs/algorithms.md.new docs/algorithms.md
	sed '/^<!-- Generated/q' docs/configuration.md > docs/configuration.md.new
	$(GO) run ./cmd/penstock schema --markdown >> docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md
	$(GO) test ./telemetry -run TestReferencePagesAreCurrent -update
	$(GO) test ./internal/lab/recipe -run TestThePagesListRecipesAndExpressions -update
	$(GO) test ./internal/lab/record -run TestThePageOfRecordsListsEachKey -update

pictures: ## redraw the pictures of the page in docs from a run of three minutes; as root, with chromium
	PENSTOCK_PICTURES='$(CURDIR)/docs' $(GO) test ./test/browser -count=1 -timeout 15m -run TestPictures

# What is there of this code is left out, so that a run that was stopped goes on; what was measured
# of other code is replaced. Over real sockets it needs root, and takes eight hours: REAL=yes is all
# of it, REAL="rpm alcc-a1" these, and with WITHIN=20m what is over by then, so that the next call
# goes on. The code is all but pages. Records of runs stay out of the tree: only their tables go into the page,
# which keeps what it says of recipes that were not played over real sockets again.
RESULTS = results
CODE    = . ':!docs' ':!*.md'
WITHIN ?= 0
measurements: VERSION = $(shell git log -1 --format=%h -- $(CODE) | tr -d '\n'; git diff --quiet HEAD -- $(CODE) || echo -dirty)
measurements: export GOFLAGS += -buildvcs=false
measurements: build ## play every recipe and rewrite the tables of docs/measurements.md
	mkdir -p $(RESULTS)
	bin/penstock-lab bench recipe all --virtual --resume --replace --json $(RESULTS)/virtual.jsonl >/dev/null \
		|| [ $$? = 1 ]
	@if [ -n "$(REAL)" ]; then set -x; bin/penstock-lab bench recipe $(REAL:yes=all) --within $(WITHIN) --resume --replace \
		--json $(RESULTS)/real.jsonl || [ $$? = 1 ]; fi
	sed '/^<!-- Generated/q' docs/measurements.md > docs/measurements.md.new
	(set -e; echo; bin/penstock-lab sim --all; echo; echo '## Published experiments'; echo; \
		bin/penstock-lab bench recipe table --earlier docs/measurements.md $$(ls $(RESULTS)/*.jsonl)) \
		>> docs/measurements.md.new
	mv docs/measurements.md.new docs/measurements.md

bpf: ## rewrite the eBPF objects; with clang-14, llvm-14 and libbpf-dev
	$(GO) generate ./$(BPF)

bpf-check: ## whether the eBPF objects are those of their source
	@missing=; \
	command -v clang-14 >/dev/null || missing="$$missing clang-14"; \
	command -v llvm-strip-14 >/dev/null || missing="$$missing llvm-14"; \
	[ -e /usr/include/bpf/bpf_helpers.h ] || missing="$$missing libbpf-dev"; \
	if [ -n "$$missing" ]; then echo "bpf-check: SKIPPED: the eBPF objects cannot be rebuilt; install$$missing"; exit 0; fi; \
	set -e; again=$$(mktemp -d); trap 'rm -r "$$again"' EXIT; \
	echo BPF_OUTPUT="$$again" $(GO) generate ./$(BPF); BPF_OUTPUT="$$again" $(GO) generate ./$(BPF); \
	for file in $(BPF)/control_bpfel.go $(BPF)/control_bpfel.o; do \
		cmp "$$file" "$$again/$${file##*/}" || { echo "bpf-check: $$file is not what its source gives; run: make bpf"; exit 1; }; \
	done

cross: ## compile, without optimization, for other processors, and what is not bound to Linux for another system
	@set -e; for target in $(CROSS); do \
		packages=./...; case $$target in linux/*) ;; *) packages="./alcc/... ./cc/... ./proxy/datapath/...";; esac; \
		echo GOOS=$${target%/*} GOARCH=$${target#*/} $(GO) build -gcflags "all=-N -l" $$packages; \
		CGO_ENABLED=0 GOOS=$${target%/*} GOARCH=$${target#*/} $(GO) build -gcflags "all=-N -l" $$packages; \
	done

emulated-test: ## unit tests for other processors (EMULATED); with qemu-user
	@set -e; without=$$(sed -n 's/^func \([TF][A-Za-z0-9_]*\)(.*/\1/p' $(EMULATED_WITHOUT) | paste -sd'|' -); \
	for arch in $(EMULATED); do \
		by=qemu-$$arch; packages="$(EMULATED_PACKAGES)"; \
		case $$arch in arm64) by=qemu-aarch64;; mipsle) by=qemu-mipsel;; esac; \
		if [ -n "$$by" ] && ! command -v $$by >/dev/null; then \
			echo "emulated-test: SKIPPED: $$arch needs $$by; install qemu-user"; continue; \
		fi; \
		echo GOARCH=$$arch $(GO) test -short -exec "'$$by'" $$packages; \
		CGO_ENABLED=0 GOOS=linux GOARCH=$$arch GOARM=7 GOMIPS=softfloat RAPID_CHECKS=5 $(GO) test -short \
			-timeout $(TIMEOUT) -exec "$$by" -skip "^($$without)\$$" $$packages; \
	done

demo: build ## the main job on an emulated cellular link, measured
	bin/penstock-lab demo

dist: ## the program for every kind of machine, and its man pages and completions, in dist
	@set -e; for arch in $(ARCHS); do \
		tags=; case " $(ROUTERS) " in *" $$arch "*) tags="$(ROUTER)";; esac; \
		echo GOARCH=$$arch $(GO) build $$tags -o $(DIST)/linux-$$arch/penstock ./cmd/penstock; \
		CGO_ENABLED=0 GOOS=linux GOARCH=$$arch GOARM=7 GOMIPS=softfloat $(GO) build $$tags -buildvcs=false \
			$(PROGRAM) -o $(DIST)/linux-$$arch/penstock ./cmd/penstock; \
	done
	@set -e; for arch in $(LABS); do \
		echo GOARCH=$$arch $(GO) build -o $(DIST)/linux-$$arch/penstock-lab ./cmd/penstock-lab, and agents; \
		GOARCH=$$arch $(MAKE) --no-print-directory BIN=$(DIST)/linux-$$arch penstock-lab agents >/dev/null; \
	done
	rm -rf $(DIST)/man $(DIST)/completion $(DIST)/lab
	SOURCE_DATE_EPOCH=$(DATE) $(GO) run -tags packaging ./cmd/penstock manual $(DIST)
	SOURCE_DATE_EPOCH=$(DATE) $(GO) run -tags packaging ./cmd/penstock-lab manual $(DIST)/lab
	gzip -9n $(DIST)/man/*.[15] $(DIST)/lab/man/*.1

packages: dist ## deb, rpm and apk of what dist made
	rm -f $(addprefix $(DIST)/,*.deb *.rpm *.apk)
	@set -e; for arch in $(patsubst arm,arm7,$(filter-out mipsle,$(ARCHS))); do \
		rm -rf dist/package; mkdir -p dist/package; \
		cp -r $(DIST)/linux-$${arch%7}/penstock* $(DIST)/man $(DIST)/completion $(DIST)/lab dist/package/; \
		files=deploy/nfpm.yaml; case " $(LABS) " in *" $$arch "*) files="$$files deploy/nfpm-lab.yaml";; esac; \
		for file in $$files; do for kind in deb rpm apk; do \
			ARCH=$$arch VERSION=$(PACKAGE_VERSION) SOURCE_DATE_EPOCH=$(DATE) $(NFPM) package -f $$file -p $$kind -t $(DIST)/; \
		done; done; \
	done

image: ## the container image for this machine, by buildah or docker; with dist
	@set -e; build="buildah build --format docker --ignorefile deploy/Dockerfile.dockerignore"; \
	command -v buildah >/dev/null || build="docker build"; \
	$$build -f deploy/Dockerfile --build-arg TARGETARCH=$$($(GO) env GOARCH) \
		--build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) -t penstock:$(subst ~,-,$(PACKAGE_VERSION)) .

release: packages ## all that a release has, with checksums and a bill of materials
	@tag=$$(git describe --tags --exact-match --match 'v*' 2>/dev/null); case "$$tag" in ''|v$(RELEASE)) ;; *) \
		echo "release: the tag is $$tag, and internal/cli/VERSION is $(RELEASE)"; exit 1;; esac
	rm -f $(addprefix $(DIST)/,*.tar.gz *.cdx.json SHA256SUMS)
	set -e; for arch in $(ARCHS); do \
		cp LICENSE README.md $(DIST)/linux-$$arch/; \
		tar --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime=@$(DATE) -C $(DIST) -cf - linux-$$arch/penstock \
			linux-$$arch/LICENSE linux-$$arch/README.md | gzip -9n > $(DIST)/penstock-$(PACKAGE_VERSION)-linux-$$arch.tar.gz; \
	done
	$(GO) run -tags packaging ./cmd/penstock sbom $(DIST)/linux-amd64/penstock > $(DIST)/penstock.cdx.json
	cd $(DIST) && sha256sum *.deb *.rpm *.apk *.tar.gz *.cdx.json > SHA256SUMS

manifests: ## have a real kube-apiserver judge the manifests; with etcd, kube-apiserver and kubectl
	deploy/kubernetes/validate.sh

package-test: packages ## install, use, upgrade and remove the deb in copies of this Debian, one of them booted; as root
	deploy/package/test.sh $(DIST)/penstock_*_amd64.deb
	deploy/package/booted.sh $(DIST)/penstock_*_amd64.deb

kubernetes-test: ## boot Kubernetes here and run the manifests in it; as root, builds Kubernetes the first time
	test/kubernetes/run.sh

clean:
	rm -rf bin $(DIST)
