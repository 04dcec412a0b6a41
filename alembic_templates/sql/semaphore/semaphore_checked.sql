CREATE OR REPLACE FUNCTION lock.semaphore_checked(value text, what text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $body$
-- sqlalchemy_locks 0001
BEGIN
  -- Texts that every engine stores and compares unchanged.
  IF length(value) BETWEEN 1 AND 255 AND right(value, 1) <> ' ' THEN
    RETURN value;
  END IF;
  RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = what || CASE
    WHEN value IS NULL THEN ' must not be NULL'
    WHEN value = '' THEN ' must not be empty'
    WHEN length(value) > 255 THEN ' has ' || length(value) || ' characters: 255 are the most that every engine can keep'
    ELSE ' ends with a space, which some collations don''t compare: ' || quote_literal(value)
  END;
END
$body$;
