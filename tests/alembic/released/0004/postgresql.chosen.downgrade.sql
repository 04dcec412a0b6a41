DROP FUNCTION IF EXISTS "elsewhere".semaphore_delete(text, text, text);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_resize(text, integer, text, text, boolean);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_create(text, integer, text, text, boolean);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_renew(text, text, text);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_release(text, text, text);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_in_turn(bigint[], text[], integer[], text, text, double precision, text);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_acquire(text[], integer[], text, text, double precision, text);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_take_back(bigint);

DROP FUNCTION IF EXISTS "elsewhere".semaphore_checked(text, text);

DROP TABLE IF EXISTS "elsewhere".semaphore_history;

DROP TABLE IF EXISTS "elsewhere".permit;

DROP TABLE IF EXISTS "elsewhere".permit_request;

DROP TABLE IF EXISTS "elsewhere".semaphore;

DELETE FROM "elsewhere".installed WHERE step = '0004';
