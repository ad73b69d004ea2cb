package journal

// Seal makes an object of records that need not be any, so that the fuzzer comes past the checksum.
func Seal(records []byte) []byte { return encodeRecords(records) }
