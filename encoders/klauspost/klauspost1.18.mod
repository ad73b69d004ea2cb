module hydrofoil.dev/foil/encoders/klauspost

go 1.26

require (
	github.com/klauspost/compress v1.18.0
	hydrofoil.dev/foil/encoders/stream v0.0.0
)

replace hydrofoil.dev/foil/encoders/stream => ../stream
