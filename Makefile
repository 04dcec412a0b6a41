# All that is needed is made on the way, in .venv/; what Debian has to bring is installed by root only (or by sudo,
# where that asks for no password).

.PHONY: demo test

demo: # eight processes fight over three keys; URL=postgresql+psycopg://... has them do it on a server
	@tools/demo '$(value URL)'

test: # everything, on real servers that the tests start
	@tools/test
