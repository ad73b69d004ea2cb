package near

// Dir is where the files are.
func (s *Store) Dir() string { return s.o.Dir }
