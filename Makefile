# Everything needed is installed in .venv/ on the way. Debian packages are installed as root only, or by sudo if it asks
# for no password.

.PHONY: bench demo test test-clusters test-snapshot-isolation torture

bench: # run the benchmarks, compared with other libraries; ONLY='lock redis' runs these
	@tools/bench $(value ONLY)

demo: # eight processes compete for three keys; URL=postgresql+psycopg://... runs it on a server
	@tools/demo '$(value URL)'

test: # all checks and tests, on real servers that the tests start
	@tools/test

test-clusters: # the tests on clusters of three nodes (Galera, Group Replication), which the tests start
	@tools/test-clusters

test-snapshot-isolation: # the tests on MariaDB with innodb_snapshot_isolation=ON, which later versions begin with
	@tools/test-snapshot-isolation

torture: # try to break every promise under faults: MINUTES=30 for each engine, ENGINE=mysql for one; see docs/tested.md
	@tools/torture '$(or $(MINUTES),10)' '$(value ENGINE)'
