module hydrofoil.dev/foil/encoders/stream

go 1.26
