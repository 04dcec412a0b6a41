# Everything needed is installed in .venv/ on the way. Debian packages are installed as root only, or by sudo if it asks
# for no password.

.PHONY: bench demo test

bench: # run a benchmark: NAME=lock, or with arguments NAME='waiting sqlite'; without NAME, list them
	@tools/bench $(value NAME)

demo: # eight processes compete for three keys; URL=postgresql+psycopg://... runs it on a server
	@tools/demo '$(value URL)'

test: # all checks and tests, on real servers that the tests start
	@tools/test
