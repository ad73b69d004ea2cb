package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/catalogtest"
	"hydrofoil.dev/foil/internal/server/catalog/postgres"
	"hydrofoil.dev/foil/internal/server/catalog/postgres/postgrestest"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
)

// memoryLog keeps what is logged.
type memoryLog struct {
	mu      sync.Mutex
	changes []catalog.Change // guarded by mu
	fail    func() error     // after the changes were kept; nil: none
}

func (l *memoryLog) Append(_ context.Context, changes []catalog.Change) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changes = append(l.changes, changes...)
	if l.fail != nil {
		return l.fail()
	}
	return nil
}

// latest is the value of each register that counts.
func (l *memoryLog) latest() map[string]catalog.Change {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := map[string]catalog.Change{}
	for _, c := range l.changes {
		key := fmt.Sprint(c.Repo, " ", c.Kind, " ", c.Name)
		if c.Version > all[key].Version {
			all[key] = c
		}
	}
	return all
}

func quietly() postgres.Options { return postgres.Options{Log: slog.New(slog.DiscardHandler)} }

// replicas opens a database several times, as several processes do.
func replicas(t *testing.T, at string, n int) (all []*sqlcat.Catalog) {
	t.Helper()
	for range n {
		c, err := postgres.Open(t.Context(), at, quietly())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		all = append(all, c)
	}
	return all
}

// policy has one quota over all repositories, and tags beginning with "v" that never move.
type policy struct{ quota catalog.Quota }

func (p policy) Quotas(string) []catalog.Quota { return []catalog.Quota{p.quota} }

func (p policy) Immutable(_, tag string) string {
	if strings.HasPrefix(tag, "v") {
		return "rule"
	}
	return ""
}

// However many processes push at once, quotas are exact, and one of those who push an immutable tag wins.
func TestBoundsAcrossProcesses(t *testing.T) {
	at := postgrestest.Start(t).Database()
	all := replicas(t, at, 3)
	const room, pushers = 9, 60
	for _, c := range all {
		c.SetPolicy(func() catalog.Policy {
			return policy{catalog.Quota{Name: "q", Manifests: room, Counts: func(string) bool { return true }}}
		})
	}
	var in, out, won atomic.Int64
	var pushing sync.WaitGroup
	for i := range pushers {
		c := all[i%len(all)]
		pushing.Go(func() {
			m := catalog.Manifest{Digest: digest.FromString(fmt.Sprint(i)), Bytes: []byte(fmt.Sprint(i))}
			err := c.PutManifest(t.Context(), fmt.Sprint("r", i%5), m)
			if refused, ok := errors.AsType[*catalog.Refusal](err); ok && refused.Quota {
				out.Add(1)
			} else if err != nil {
				t.Error(err)
			} else {
				in.Add(1)
			}
		})
	}
	pushing.Wait()
	if in.Load() != room || out.Load() != pushers-room {
		t.Errorf("%d were let in and %d refused, want %d and %d", in.Load(), out.Load(), room, pushers-room)
	}
	for _, c := range all {
		c.SetPolicy(func() catalog.Policy { return policy{catalog.Quota{Name: "q"}} })
	}
	for i := range pushers {
		c := all[i%len(all)]
		pushing.Go(func() {
			err := c.PutManifest(t.Context(), "r", catalog.Manifest{Digest: digest.FromString(fmt.Sprint("v", i)), Bytes: []byte("{}")}, "v1")
			if _, ok := errors.AsType[*catalog.Refusal](err); !ok && err != nil {
				t.Error(err)
			} else if err == nil {
				won.Add(1)
			}
		})
	}
	pushing.Wait()
	if won.Load() != 1 {
		t.Errorf("%d pushes of an immutable tag were accepted", won.Load())
	}
}

// Processes push, delete, bring back, purge and collect the same few things: no blob goes that a manifest names, what is counted is right, and
// the log says in the end what the database says.
func TestEverythingAtOnce(t *testing.T) {
	s := postgrestest.Start(t)
	at := s.Database()
	const lease = 500 * time.Millisecond
	all := replicas(t, at, 3)
	log := new(memoryLog)
	dropped := 0              // guarded by the log's lock
	log.fail = func() error { // it was written, and nobody knows: it is written again
		if dropped++; dropped%3 == 0 {
			return errors.New("lost")
		}
		return nil
	}
	for _, c := range all {
		c.SetLease(lease)
		if err := c.SetLog(t.Context(), log); err != nil {
			t.Fatal(err)
		}
	}
	var slow atomic.Bool // a push took longer than a lease
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	due := func() catalog.Due { return catalog.Due{Now: time.Now(), Grace: -1, Limit: 20} }
	var steps, deadlocked, dead atomic.Int64
	var work sync.WaitGroup
	for worker := range 9 {
		c, random := all[worker%len(all)], rand.New(rand.NewPCG(seed, uint64(worker)))
		work.Go(func() {
			for range 150 {
				repo, b := fmt.Sprint("r", random.IntN(3)), catalog.Blob{Digest: digest.FromString(fmt.Sprint("blob", random.IntN(25))), Size: 7}
				m := catalogtest.Naming(b.Digest)
				ctx, err := t.Context(), error(nil)
				switch random.IntN(9) {
				case 0, 1, 2: // a push: the blob was said to be there, for a while
					began := time.Now()
					if err = c.LinkBlob(ctx, repo, b); err == nil {
						err = c.PutManifest(ctx, repo, m, fmt.Sprint("t", random.IntN(3)))
					}
					if time.Since(began) > lease {
						slow.Store(true)
					}
				case 3:
					err = c.DeleteManifest(ctx, repo, m.Digest)
				case 4:
					err = c.DeleteTag(ctx, repo, fmt.Sprint("t", random.IntN(3)))
				case 5:
					items, derr := c.Deleted(ctx, repo)
					if err = derr; err == nil {
						_, err = c.Undelete(ctx, repo, items)
					}
				case 6:
					_, err = c.Purge(ctx, time.Now().Add(-time.Millisecond), 3)
				case 7:
					var done catalog.Collected
					done, err = c.CollectLinks(ctx, due())
					dead.Add(int64(done.Dead))
				case 8:
					_, err = c.CollectRepositories(ctx, due())
				}
				steps.Add(1)
				if _, ok := errors.AsType[*catalog.Unavailable](err); ok {
					deadlocked.Add(1)
				} else if err != nil && !errors.Is(err, catalog.ErrNotFound) {
					t.Errorf("%v", err)
				}
			}
		})
	}
	work.Wait()
	t.Logf("%d steps, %d gave up, %d links were collected", steps.Load(), deadlocked.Load(), dead.Load())
	db := postgrestest.Open(t, at)
	for what, query := range map[string]string{
		"blobs that manifests name and are gone": `SELECT count(*) FROM manifests m, foil_named(m.bytes) d WHERE NOT EXISTS (SELECT 1 FROM blobs b WHERE b.repo = m.repo AND b.digest = d)`,
		"manifests whose refs are gone":          `SELECT count(*) FROM known_manifests m, foil_digests(m.bytes) d WHERE NOT EXISTS (SELECT 1 FROM refs r WHERE r.repo = m.repo AND r.manifest = m.digest AND r.digest = d)`,
		"refs of no manifest":                    `SELECT count(*) FROM refs r WHERE NOT EXISTS (SELECT 1 FROM known_manifests m WHERE m.repo = r.repo AND m.digest = r.manifest)`,
		"repositories that are counted wrong": `SELECT count(*) FROM usage u WHERE bytes + loose <> (SELECT coalesce(sum(size), 0) FROM blobs WHERE repo = u.repo) + (SELECT coalesce(sum(length(bytes)), 0) FROM manifests WHERE repo = u.repo)
			OR loose <> (SELECT coalesce(sum(size), 0) FROM blobs b WHERE repo = u.repo AND NOT EXISTS (SELECT 1 FROM manifest_blobs n WHERE n.repo = b.repo AND n.digest = b.digest))
			OR manifests <> (SELECT count(*) FROM manifests WHERE repo = u.repo)`,
		"tags of no manifest": `SELECT count(*) FROM tags t WHERE NOT EXISTS (SELECT 1 FROM manifests m WHERE m.repo = t.repo AND m.digest = t.digest)`,
	} {
		var n int
		if err := db.QueryRowContext(t.Context(), query).Scan(&n); err != nil || n != 0 && !(slow.Load() && strings.HasPrefix(what, "blobs")) {
			t.Errorf("%s: %d, %v", what, n, err)
		}
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		var left int
		if err := db.QueryRowContext(t.Context(), `SELECT count(*) FROM outbox`).Scan(&left); err != nil {
			t.Fatal(err)
		}
		if left == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d changes are not in the log", left)
		}
	}
	want := map[string]string{}
	for key, c := range log.latest() {
		if !c.Gone && c.Kind != catalog.ChangesWhole {
			want[key] = fmt.Sprint(c.Target, c.Blob.Size, c.Manifest.Digest)
		}
	}
	got := map[string]string{}
	err := all[0].EachLogged(t.Context(), func(changes []catalog.Change) error {
		for _, c := range changes {
			got[fmt.Sprint(c.Repo, " ", c.Kind, " ", c.Name)] = fmt.Sprint(c.Target, c.Blob.Size, c.Manifest.Digest)
		}
		return nil
	})
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("the log, and the database: %v\n%s", err, diff)
	}
}

// A manifest that is brought back while its time is over is whole, or gone.
func TestUndeleteOrPurge(t *testing.T) {
	at := postgrestest.Start(t).Database()
	all := replicas(t, at, 2)
	db := postgrestest.Open(t, at)
	m := catalogtest.Naming(digest.FromString("index of nothing"))
	m.Bytes = []byte(`{"annotations":{"of":"sha256:0"}}`)
	back, gone := 0, 0
	for round := range 30 {
		repo := fmt.Sprint("r", round%2)
		if err := errors.Join(all[0].PutManifest(t.Context(), repo, m), all[0].DeleteManifest(t.Context(), repo, m.Digest)); err != nil {
			t.Fatal(err)
		}
		items, err := all[0].Deleted(t.Context(), repo)
		if err != nil || len(items) != 1 {
			t.Fatalf("%+v, %v", items, err)
		}
		var both sync.WaitGroup
		both.Go(func() {
			if _, err := all[0].Undelete(t.Context(), repo, items); err != nil {
				t.Error(err)
			}
		})
		both.Go(func() {
			time.Sleep(rand.N(3 * time.Millisecond))
			if _, err := all[1].Purge(t.Context(), time.Now().Add(time.Minute), 10); err != nil {
				t.Error(err)
			}
		})
		both.Wait()
		var there, refs int
		err = db.QueryRowContext(t.Context(), `SELECT (SELECT count(*) FROM manifests JOIN repositories r ON r.id = repo WHERE r.name = $1),
			(SELECT count(*) FROM refs JOIN repositories r ON r.id = repo WHERE r.name = $1)`, repo).Scan(&there, &refs)
		if err != nil || there != refs {
			t.Fatalf("round %d: %d manifests and %d refs, %v", round, there, refs, err)
		}
		back, gone = back+there, gone+1-there
	}
	t.Logf("%d times it came back, %d times it was gone", back, gone)
}

// A commit whose connection is lost is made once, whether or not the database has made it.
func TestLostCommits(t *testing.T) {
	s := postgrestest.Start(t)
	for _, before := range []bool{true, false} {
		t.Run(fmt.Sprint("before=", before), func(t *testing.T) {
			at, proxy := s.Database(), s.Proxy()
			c, err := postgres.Open(t.Context(), proxy.Through(at), quietly())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			proxy.CutAt("commit", before, 3)
			for i := range 5 {
				m := catalog.Manifest{Digest: digest.FromString(fmt.Sprint(i)), Bytes: []byte("{}"), Pushed: time.Unix(1, 0)}
				if err := c.PutManifest(t.Context(), "r", m, "t"); err != nil {
					t.Error(err)
				}
				if err := c.AddPack(t.Context(), catalogtest.Pack(fmt.Sprint("packs/", i), i*10, i*10+9, 2)); err != nil {
					t.Error(err)
				}
			}
			if n := proxy.Left(); n != 0 {
				t.Errorf("%d commits were not cut", n)
			}
			var manifests, tags, packs, uses int
			err = postgrestest.Open(t, at).QueryRowContext(t.Context(), `SELECT (SELECT count(*) FROM outbox WHERE convert_from(change, 'UTF8')::jsonb -> 'Kind' = '3'),
				(SELECT count(*) FROM outbox WHERE convert_from(change, 'UTF8')::jsonb -> 'Kind' = '4'), (SELECT count(*) FROM packs), (SELECT max(manifests) FROM usage)`).Scan(&manifests, &tags, &packs, &uses)
			if err != nil || manifests != 5 || tags != 5 || packs != 5 || uses != 5 {
				t.Errorf("%d manifests and %d tags were logged, %d packs, %d manifests counted, %v; want 5 of each", manifests, tags, packs, uses, err)
			}
		})
	}
}

// Connections are lost, and the server is killed and comes back, while processes push and read: what was acknowledged is there.
func TestServerDies(t *testing.T) {
	s := postgrestest.Start(t)
	at, proxy := s.Database(), s.Proxy()
	c, err := postgres.Open(t.Context(), proxy.Through(at), quietly())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	stop := make(chan struct{})
	var work sync.WaitGroup
	var acknowledged sync.Map
	var pushed, unavailable atomic.Int64
	for worker := range 4 {
		work.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				name := fmt.Sprintf("%d-%d", worker, i)
				m := catalog.Manifest{Digest: digest.FromString(name), Bytes: []byte(name), Pushed: time.Unix(1, 0)}
				err := c.PutManifest(t.Context(), "r", m, name)
				if err == nil {
					acknowledged.Store(name, true)
					pushed.Add(1)
					continue
				}
				if _, ok := errors.AsType[*catalog.Unavailable](err); ok {
					unavailable.Add(1)
				} else {
					t.Error(err)
				}
			}
		})
	}
	for range 10 {
		time.Sleep(50 * time.Millisecond)
		proxy.Drop()
	}
	for range 2 {
		s.Kill()
		time.Sleep(100 * time.Millisecond)
		s.Restart()
		time.Sleep(300 * time.Millisecond)
	}
	s.Stop()
	s.Restart()
	time.Sleep(300 * time.Millisecond)
	close(stop)
	work.Wait()
	lost := 0
	acknowledged.Range(func(name, _ any) bool {
		if d, err := c.Tag(t.Context(), "r", name.(string)); err != nil || d != digest.FromString(name.(string)) {
			lost++
		}
		return true
	})
	t.Logf("%d pushes, %d were told to come again, %d of those acknowledged are lost", pushed.Load(), unavailable.Load(), lost)
	if lost > 0 || pushed.Load() < 50 {
		t.Errorf("%d of %d acknowledged pushes are lost", lost, pushed.Load())
	}
}

// What a read or a change costs in statements: a blob GET is one. A statement is parsed once on a connection.
func TestStatements(t *testing.T) {
	s := postgrestest.Start(t)
	proxy := s.Proxy()
	c, err := postgres.Open(t.Context(), proxy.Through(s.Database())+"&pool_max_conns=4", quietly())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := catalog.Blob{Digest: digest.FromString("b"), Size: 1}
	m := catalogtest.Naming(b.Digest)
	push := func() {
		t.Helper()
		if err := errors.Join(c.LinkBlob(t.Context(), "r", b), c.PutManifest(t.Context(), "r", m, "t")); err != nil {
			t.Fatal(err)
		}
	}
	read := func() {
		t.Helper()
		_, err := c.Blob(t.Context(), "r", b.Digest)
		if err != nil {
			t.Fatal(err)
		}
	}
	for range 8 { // on each connection
		push()
		read()
	}
	count := func(fn func()) (parsed, executed int) {
		p, e := proxy.Messages()
		for range 10 {
			fn()
		}
		p2, e2 := proxy.Messages()
		return p2 - p, e2 - e
	}
	if parsed, executed := count(read); parsed != 0 || executed != 10 {
		t.Errorf("10 reads of a blob: %d statements were parsed, %d executed; want 0 and 10", parsed, executed)
	}
	parsed, executed := count(push)
	t.Logf("10 pushes of a blob and a manifest that are there: %d statements parsed, %d executed, and BEGIN and COMMIT", parsed, executed)
	if parsed != 0 || executed > 10*16 {
		t.Errorf("10 pushes: %d statements were parsed, %d executed", parsed, executed)
	}
}
