/*
 * What a client sees of YugabyteDB, as settings of a database: its version, its flags, and how it fails; see
 * yugabytedb.py.
 */
#include "postgres.h"
#include "access/xact.h"
#include "common/pg_prng.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "storage/proc.h"
#include "utils/builtins.h"
#include "utils/guc.h"

PG_MODULE_MAGIC;
PG_FUNCTION_INFO_V1(stand_in_version);

static bool yb_disable_transactional_writes = false;
static bool yb_enable_advisory_locks = false;
static bool yb_silence_advisory_locks_not_supported_error = false;
static bool yb_enable_listen_notify = false;
static char *version;
static double failures = 0;
static int	seed = 0;

static pg_prng_state chance;
static bool seeded = false;
static ExecutorStart_hook_type previous_start;
static ExecutorRun_hook_type previous_run;

static void
assign_version(const char *value, void *extra)
{
	SetConfigOption("server_version", value, PGC_INTERNAL, PGC_S_DYNAMIC_DEFAULT);
}

static void
fail_by_chance(void)
{
	if (failures <= 0)
		return;
	if (!seeded)
	{
		/* another one for each session, or what fails would fail again in the next one */
		pg_prng_seed(&chance, ((uint64) seed << 32) + MyProcPid);
		seeded = true;
	}
	if (pg_prng_double(&chance) >= failures)
		return;
	switch (pg_prng_uint64_range(&chance, 0, 2))
	{
		case 0:
			ereport(ERROR, errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
					errmsg("Restart read required at: read: { physical: 1764200000000000 }"));
		case 1:
			ereport(ERROR, errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
					errmsg("could not serialize access due to concurrent update"));
		default:
			ereport(ERROR, errcode(ERRCODE_T_R_DEADLOCK_DETECTED), errmsg("deadlock detected"));
	}
}

static void
start(QueryDesc *query, int flags)
{
	if (!(flags & EXEC_FLAG_EXPLAIN_ONLY))
		fail_by_chance();
	(previous_start ? previous_start : standard_ExecutorStart) (query, flags);
}

/* A wait for a row, unlike one for an advisory lock, isn't ended by lock_timeout. */
static void
run(QueryDesc *query, ScanDirection direction, uint64 count, bool once)
{
	bool		waits_for_rows = query->operation == CMD_UPDATE || query->operation == CMD_DELETE ||
		query->plannedstmt->rowMarks != NIL;
	int			limit = LockTimeout;

	if (waits_for_rows)
		LockTimeout = 0;
	PG_TRY();
	{
		(previous_run ? previous_run : standard_ExecutorRun) (query, direction, count, once);
	}
	PG_FINALLY();
	{
		if (waits_for_rows)
			LockTimeout = limit;
	}
	PG_END_TRY();
}

static void
at_end(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_PRE_COMMIT)
		fail_by_chance();
}

static void
flag(const char *name, bool *value, GucContext context)
{
	DefineCustomBoolVariable(name, "Known, as YugabyteDB knows it; without effect.", NULL,
							 value, false, context, 0, NULL, NULL, NULL);
}

void
_PG_init(void)
{
	flag("yb_disable_transactional_writes", &yb_disable_transactional_writes, PGC_USERSET);
	flag("yb_enable_advisory_locks", &yb_enable_advisory_locks, PGC_SUSET);
	flag("yb_silence_advisory_locks_not_supported_error",
		 &yb_silence_advisory_locks_not_supported_error, PGC_USERSET);
	flag("yb_enable_listen_notify", &yb_enable_listen_notify, PGC_SUSET);
	DefineCustomStringVariable("stand_in.version", "What version() answers.", NULL, &version,
							   "15.2-YB-2.25.2.0-b359", PGC_SUSET, 0, NULL, assign_version, NULL);
	DefineCustomRealVariable("stand_in.failures", "How many statements and COMMITs fail.", NULL,
							 &failures, 0, 0, 1, PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("stand_in.seed", "Decides which.", NULL,
							&seed, 0, 0, INT_MAX, PGC_SUSET, 0, NULL, NULL, NULL);
	previous_start = ExecutorStart_hook;
	ExecutorStart_hook = start;
	previous_run = ExecutorRun_hook;
	ExecutorRun_hook = run;
	RegisterXactCallback(at_end, NULL);
}

Datum
stand_in_version(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(cstring_to_text(psprintf("PostgreSQL %s on x86_64-pc-linux-gnu, "
											  "compiled by clang version 17.0.6, 64-bit", version)));
}
