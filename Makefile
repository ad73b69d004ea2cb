# The two commands to know are `make demo` and `make test`. Everything that
# they need beyond Go is installed by scripts/deps, on Debian and Ubuntu.

GO      ?= go
CACHE   := $(CURDIR)/.cache
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.release=$(VERSION)

# Two packages at a time: kernel tests mount, wait and sleep, so that more
# would not be quicker on small machines, and would disturb each other. The
# timeout is for what hangs: a machine with much else to do needs more than ten
# minutes for the end-to-end tests alone. lockorder has the worker's locks check
# their order.
TESTFLAGS ?= -p 2 -timeout 20m -tags lockorder
# Packages whose tests run once more under the race detector: those in which
# goroutines share state.
RACE ?= $(shell cat scripts/race-packages)
FUZZTIME ?= 10s
BENCHTIME ?= 1s
BENCH ?= .

LINT := $(CACHE)/bin/golangci-lint
# containerd 1.7 and 2, for the tests of the snapshotter under them; distributions
# have neither, or older ones.
export FOIL_TEST_CONTAINERD1 ?= $(CACHE)/containerd1
export FOIL_TEST_CONTAINERD2 ?= $(CACHE)/containerd2
# runc as pods in user namespaces need it.
export FOIL_TEST_RUNC ?= $(CACHE)/runc
# The kubelet, and for test-kubernetes a control plane.
export FOIL_TEST_KUBELET ?= $(CACHE)/kubernetes
# What the server must pass, and a registry in front of which it is put: distribution 3.
export FOIL_TEST_CONFORMANCE ?= $(CACHE)/bin/conformance
export FOIL_TEST_REGISTRY ?= $(CACHE)/bin/registry

# A store that speaks S3.
export FOIL_TEST_VERSITYGW ?= $(CACHE)/bin/versitygw

# What logs in at the server in tests, besides what distributions have.
export FOIL_TEST_CLIENTS ?= $(CACHE)/clients

.PHONY: build encoders bin/bench test test-kubernetes test-clients lint vet unit race demo bench bench-server bench-go fuzz deps tidy clean

build: encoders
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)' -o bin/foil ./cmd/foil

# Programs that foil has in it, each one library in one version (package encoder). The bytes that they make are a
# promise, so that the toolchain is pinned as well.
PROGRAMS := internal/format/encoder/programs/bin
ENCODER   = CGO_ENABLED=0 GOTOOLCHAIN=go1.26.8 $(GO) build -trimpath -buildvcs=false -ldflags '-s -w'
PACK      = gzip -9nc $(CACHE)/$(@F:.gz=) > $(CURDIR)/$(PROGRAMS)
encoders: $(PROGRAMS)/klauspost1.20.gz $(PROGRAMS)/klauspost1.18.gz $(PROGRAMS)/zlib1.2.11.gz

$(PROGRAMS)/klauspost1.20.gz: encoders/klauspost/main.go encoders/klauspost/go.mod encoders/klauspost/go.sum encoders/stream/stream.go
	cd encoders/klauspost && $(ENCODER) -o $(CACHE)/$(@F:.gz=) . && $(PACK)/$(@F)

$(PROGRAMS)/klauspost1.18.gz: encoders/klauspost/main.go encoders/klauspost/klauspost1.18.mod encoders/klauspost/klauspost1.18.sum encoders/stream/stream.go
	cd encoders/klauspost && $(ENCODER) -modfile=klauspost1.18.mod -o $(CACHE)/$(@F:.gz=) . && $(PACK)/$(@F)

$(PROGRAMS)/zlib1.2.11.gz: encoders/zlib/main.go encoders/zlib/go.mod encoders/zlib/go.sum encoders/stream/stream.go
	cd encoders/zlib && $(ENCODER) -o $(CACHE)/$(@F:.gz=) . && $(PACK)/$(@F)

# Measures, and makes images to try foil with: bin/bench images --help.
bin/bench:
	cd bench && $(GO) build -o ../$@ ./cmd/bench

deps:
	@scripts/deps test

# unit comes last: its closing lines tell the whole result.
test: deps vet lint race unit

vet:
	@bad=$$(gofmt -l cmd deploy encoders internal bench tools); test -z "$$bad" || { echo "not formatted (run gofmt -w):"; echo "$$bad"; exit 1; }
	$(GO) vet ./...
	cd bench && $(GO) vet ./...

# The linter's version is pinned by tools/go.mod, a module of its own, so that
# its many dependencies are not the product's.
$(LINT): tools/go.mod tools/go.sum
	cd tools && $(GO) build -o $@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

lint: $(LINT)
	GOLANGCI_LINT_CACHE=$(CACHE)/golangci-lint $(LINT) run ./...
	cd bench && GOLANGCI_LINT_CACHE=$(CACHE)/golangci-lint $(LINT) run --config ../.golangci.yaml ./...

race: $(CACHE)/bin/versitygw
	$(if $(RACE),CGO_ENABLED=1 $(GO) test -race $(TESTFLAGS) $(RACE))

# The versions are pinned like the linter's.
$(CACHE)/containerd%/containerd: tools/containerd%/go.mod tools/containerd%/go.sum
	cd tools/containerd$* && CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(@D)/ \
		$$($(GO) list -f '{{if eq .Name "main"}}{{.ImportPath}}{{end}}' tool)

# runc enters namespaces in C. Without seccomp it refuses every pod of a kubelet.
$(CACHE)/runc/runc: tools/runc/go.mod tools/runc/go.sum Makefile
	cd tools/runc && CGO_ENABLED=1 $(GO) build -trimpath -tags seccomp -ldflags '-s -w' -o $(@D)/ github.com/opencontainers/runc

# The programs ask each other for their versions, which are those of the module.
$(CACHE)/kubernetes/etcd: KUBERNETES_PACKAGE = go.etcd.io/etcd/server/v3
$(CACHE)/kubernetes/%: KUBERNETES_PACKAGE = k8s.io/kubernetes/cmd/$*
$(CACHE)/kubernetes/%: tools/kubernetes/go.mod tools/kubernetes/go.sum
	cd tools/kubernetes && version=$$($(GO) list -m -f '{{.Version}}' k8s.io/kubernetes) && CGO_ENABLED=0 $(GO) build -trimpath \
		-ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$$version -X k8s.io/client-go/pkg/version.gitVersion=$$version" \
		-o $@ $(KUBERNETES_PACKAGE)

$(CACHE)/bin/conformance: tools/conformance/go.mod tools/conformance/go.sum
	cd tools/conformance && CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $@ github.com/opencontainers/distribution-spec/conformance

$(CACHE)/bin/registry: tools/registry/main.go tools/registry/go.mod tools/registry/go.sum
	cd tools/registry && CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $@ .

$(CACHE)/bin/versitygw: tools/versitygw/go.mod tools/versitygw/go.sum
	cd tools/versitygw && CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $@ github.com/versity/versitygw/cmd/versitygw

CLIENTS := crane=github.com/google/go-containerregistry/cmd/crane oras=oras.land/oras/cmd/oras cosign=github.com/sigstore/cosign/v3/cmd/cosign

$(CACHE)/clients/dex: tools/dex/main.go tools/dex/go.mod tools/dex/go.sum
	cd tools/dex && CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $@ .

$(CACHE)/clients/%: tools/clients/go.mod tools/clients/go.sum
	cd tools/clients && CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $@ $(patsubst $*=%,%,$(filter $*=%,$(CLIENTS)))

unit: encoders $(CACHE)/containerd1/containerd $(CACHE)/containerd2/containerd $(CACHE)/runc/runc $(CACHE)/kubernetes/kubelet $(CACHE)/bin/conformance $(CACHE)/bin/registry $(CACHE)/bin/versitygw
	cd bench && $(GO) run ./cmd/gotest -C .. $(TESTFLAGS) -- . bench

# A whole Kubernetes, whose programs take some minutes more to build: pods by Deployments, limits, the
# manifests of deploy/kubernetes. `make test` has the kubelet alone.
test-kubernetes: deps $(addprefix $(CACHE)/kubernetes/,kubelet etcd kube-apiserver kube-scheduler kube-controller-manager) $(CACHE)/containerd2/containerd $(CACHE)/runc/runc
	$(GO) test $(TESTFLAGS) -v -run 'Kubelet|Kubernetes|Install' ./internal/e2e

# Others' programs log in at the server by each way that they know, and dex is a provider of OpenID Connect. cosign
# and dex take minutes to build; `make test` has skopeo and ctr alone.
test-clients: deps $(addprefix $(CACHE)/clients/,crane oras cosign dex) $(CACHE)/bin/conformance
	@scripts/deps clients
	$(GO) test $(TESTFLAGS) -v ./internal/e2e/clients

demo: build
	@scripts/deps demo
	cd bench && $(GO) run ./cmd/bench demo --foil ../bin/foil --cache $(CACHE) $(if $(IMAGE),--image $(IMAGE)) $(if $(PROBE),--probe "$(PROBE)") $(if $(CMD),-- $(CMD))

# A small matrix, in less than ten minutes; `bench run --help` has the full one.
# RESULTS is kept, and gone on with if it was interrupted.
RESULTS ?= $(CACHE)/results/$(VERSION)
IMAGES  ?= redis,nginx,debian
ENGINES ?= hydrofoil,overlayfs,curl
bench: build bin/bench
	@scripts/deps bench
	bin/bench run --foil bin/foil --cache $(CACHE) --out $(RESULTS) \
		--images $(IMAGES) --engines $(ENGINES) --rtt 0,150ms --rate 100mbit --runs 1 --load 1s $(BENCHFLAGS)
	bin/bench report $(RESULTS)

# The first image is served; all are planned, from some thousand segments to 74,000.
SERVER_IMAGES ?= redis,django,nextjs
bench-server: build bin/bench
	@scripts/deps bench
	bin/bench server --foil bin/foil --cache $(CACHE) --images $(SERVER_IMAGES)

bench-go:
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchtime $(BENCHTIME) -benchmem ./...

# Each fuzz target for FUZZTIME. `go test` takes one target at a time.
fuzz:
	@scripts/fuzz $(FUZZTIME)

# bench requires what the product requires, at the same versions.
tidy:
	$(GO) mod tidy
	cd bench && $(GO) mod tidy

clean:
	rm -rf bin .cache
