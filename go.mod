module hydrofoil.dev/foil

go 1.26
