CREATE OR REPLACE FUNCTION lock.key(VARIADIC parts text[]) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $body$
  -- sqlalchemy_locks 0001
  -- The separator is NUL, which no text contains: ('a', 'b') differs from ('a:b') and ('ab').
  -- A NULL part gives NULL, which the locks refuse.
  SELECT CASE WHEN array_position(parts, NULL) IS NULL THEN ('x' || left(encode(sha256(
    string_agg(convert_to(part, 'UTF8'), decode('00', 'hex') ORDER BY number)
  ), 'hex'), 16))::bit(64)::bigint END
  FROM unnest(parts) WITH ORDINALITY AS p (part, number)
$body$;
