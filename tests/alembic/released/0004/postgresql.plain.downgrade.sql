DROP FUNCTION IF EXISTS lock.semaphore_delete(text, text, text);

DROP FUNCTION IF EXISTS lock.semaphore_resize(text, integer, text, text, boolean);

DROP FUNCTION IF EXISTS lock.semaphore_create(text, integer, text, text, boolean);

DROP FUNCTION IF EXISTS lock.semaphore_renew(text, text, text);

DROP FUNCTION IF EXISTS lock.semaphore_release(text, text, text);

DROP FUNCTION IF EXISTS lock.semaphore_in_turn(bigint[], text[], integer[], text, text, double precision, text);

DROP FUNCTION IF EXISTS lock.semaphore_acquire(text[], integer[], text, text, double precision, text);

DROP FUNCTION IF EXISTS lock.semaphore_take_back(bigint);

DROP FUNCTION IF EXISTS lock.semaphore_checked(text, text);

DROP TABLE IF EXISTS lock.semaphore_history;

DROP TABLE IF EXISTS lock.permit;

DROP TABLE IF EXISTS lock.permit_request;

DROP TABLE IF EXISTS lock.semaphore;

DELETE FROM lock.installed WHERE step = '0004';
