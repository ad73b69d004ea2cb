module hydrofoil.dev/foil/encoders/zlib

go 1.26

require (
	hydrofoil.dev/foil/encoders/stream v0.0.0
	modernc.org/libc v1.22.5
	modernc.org/z v1.7.3
)

require (
	github.com/dustin/go-humanize v1.0.1 // indirect
	github.com/google/uuid v1.3.0 // indirect
	github.com/mattn/go-isatty v0.0.16 // indirect
	github.com/remyoudompheng/bigfft v0.0.0-20230129092748-24d4a6f8daec // indirect
	golang.org/x/sys v0.0.0-20220811171246-fbc7d0a398ab // indirect
	modernc.org/mathutil v1.5.0 // indirect
	modernc.org/memory v1.5.0 // indirect
)

replace hydrofoil.dev/foil/encoders/stream => ../stream
