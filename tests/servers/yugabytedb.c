/* What a client sees of YugabyteDB at a first glance; see yugabytedb.py. */
#include "postgres.h"
#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/guc.h"

PG_MODULE_MAGIC;
PG_FUNCTION_INFO_V1(yb_version);

#define VERSION "15.12-YB-2025.1.0.0-b0"

static bool disable_transactional_writes = false;

void
_PG_init(void)
{
	DefineCustomBoolVariable("yb_disable_transactional_writes",
							 "Known, as YugabyteDB knows it; without effect.", NULL,
							 &disable_transactional_writes, false, PGC_USERSET, 0,
							 NULL, NULL, NULL);
	SetConfigOption("server_version", VERSION, PGC_INTERNAL, PGC_S_DYNAMIC_DEFAULT);
}

Datum
yb_version(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(cstring_to_text("PostgreSQL " VERSION " on x86_64-pc-linux-gnu, "
									 "compiled by clang version 17.0.6, 64-bit"));
}
