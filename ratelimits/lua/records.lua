-- Functions for packed states. A packed state begins with its expiry (seconds since 1970), '<I4'. Then it has a record
-- for each limit. A record begins with a header of seven bytes, '<I4BI2': name of the limit (crc32), code of the
-- algorithm, size. Then come the record's own expiry, '<I4', and its payload: `size` bytes in the algorithm's format.
-- So the first record is at position 5, and a record has 11 bytes before its payload. Scripts compare headers and names
-- as bytes.

-- Returns a table from the name of each record to its position; nil if `raw` is not a packed state.
-- Accepts the code of an unknown algorithm: perhaps a newer version of the app has written this record.
--@rarely
local function scan(raw)
  local starts, pos = {}, 5
  while pos + 10 <= #raw do
    local name, code, size = struct.unpack('<c4BI2', raw, pos)
    if code < 1 then return nil end
    starts[name] = pos
    pos = pos + 11 + size
  end
  return pos == #raw + 1 and starts or nil
end

-- Finds the first record with this header, and returns the position four bytes before the record. The caller then reads
-- as if a packed state began at this position: four bytes for the expiry, then the record. Returns nil if `raw` has no
-- such record. Also returns nil if this is the first record of `raw`: the caller has already looked there.
--@rarely
local function position(raw, header)
  local pos = 5
  while pos + 10 <= #raw do
    if string.sub(raw, pos, pos + 6) == header then return pos > 5 and pos - 4 or nil end
    pos = pos + 11 + struct.unpack('<I2', raw, pos + 5)
  end
end

-- Returns the packed state `raw` with some records replaced, added or removed, and the new expiry of this packed state.
-- `records` maps the name of a record to its new bytes, or to false: then the record is removed. If `raw` already has a
-- record with this name, the new record takes its place. Otherwise the new record is appended, in the order of `names`.
-- Leaves out records that have expired at `now`. Returns nil if no record is left.
--@rarely
local function rewrite(raw, names, records, now)
  local out, latest, pos = {}, 0, 5
  local function keep(record, expiry)
    if expiry * 1e6 > now then
      out[#out + 1] = record
      if expiry > latest then latest = expiry end
    end
  end
  while raw and pos < #raw do
    local name, _, size, expiry = struct.unpack('<c4BI2I4', raw, pos)
    local record = records[name]
    if record == nil then
      keep(string.sub(raw, pos, pos + 10 + size), expiry)
    elseif record then
      keep(record, struct.unpack('<I4', record, 8))
    end
    records[name] = false -- this name is done: the loop below does not append its record
    pos = pos + 11 + size
  end
  for _, name in ipairs(names) do
    if records[name] then keep(records[name], struct.unpack('<I4', records[name], 8)) end
  end
  if #out == 0 then return nil end
  return struct.pack('<I4', latest) .. table.concat(out), latest
end

-- Returns the error for a state that cannot be read.
--@rarely
local function corrupt(key)
  return redis.error_reply('CORRUPT the state at ' .. key .. ' cannot be read: reset or delete it')
end
