module hydrofoil.dev/foil/bench

go 1.26.0

require (
	github.com/spf13/cobra v1.10.2
	golang.org/x/sys v0.49.0
	hydrofoil.dev/foil v0.0.0
)

replace hydrofoil.dev/foil => ../
