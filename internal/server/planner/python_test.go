package planner

import (
	"reflect"
	"testing"
)

func TestPythonImports(t *testing.T) {
	got := pythonImports([]byte(`#!/usr/bin/env python3
"""A module.
import nothing
"""
import os, sys as system
import a.b.c  # and why
from . import sibling
from ..up import one, two as three
from pkg import (
    first,  # a comment
    second,
)
from star import *
x = 1; import y
text = '''
import nothing
'''
try:
    import fast
except ImportError:
    fast = None
if TYPE_CHECKING:
    import nothing
def f():
    import nothing
    def g():
        import nothing

class C:
    import inner
    async def h(self):
        from nothing import nothing
if True:
    import last` + "\r\n"))
	want := []pythonImport{
		{module: "os"}, {module: "sys"}, {module: "a.b.c"},
		{names: []string{"sibling"}, level: 1}, {module: "up", names: []string{"one", "two"}, level: 2},
		{module: "pkg", names: []string{"first", "second"}}, {module: "star"},
		{module: "fast"}, {module: "inner"}, {module: "last"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
}

func FuzzPythonImports(f *testing.F) {
	f.Add([]byte("from a import (b\n"))
	f.Add([]byte("from . import\nimport ,,;\n'''"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, im := range pythonImports(b) {
			if im.module == "" && im.level == 0 {
				t.Errorf("%q imports nothing: %+v", b, im)
			}
		}
	})
}
