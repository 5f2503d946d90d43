-- Functions for the version of the rules and the run of the server, and for full batches of usage.
local run -- the run of the server, once it is known

-- Returns functions for the batches of usage.
--@rarely
local function batch_functions()
--: do batch_functions
  return {server_run = server_run, seal = batch_seal, count_new = usage_new}
end

-- A head is "<version of the rules> <run>". `got` begins with the heads of the call's shards. Writes each head that has
-- an older version than the caller's rules, or another run than the server's run. The head then has the newer of both
-- versions, and the server's run. But if `versioned` is true and a head has a newer version than the caller's rules,
-- changes nothing and returns this newer version: the call is stale.
--@rarely
local function update_heads(got, now, versioned)
  local batches = batch_functions()
  local expected_version, expected_run = string.match(ARGV[2], '^(%d+) (.*)$')
  local new_versions, new_runs, asked_server = {}, {}, false
  run = expected_run
  for i = 1, ${head_count} do
    if got[i] ~= ARGV[2] then
      local stored_version, stored_run = string.match(got[i] or '', '^(%d+) (.*)$')
      stored_version = tonumber(stored_version or 0)
--: if decides
      -- A receipt can be refunded or settled even if the rules have changed since.
      if versioned and tonumber(expected_version) < stored_version then return stored_version end
--: end
--: if not virtual
      if stored_run ~= run and not asked_server then
        -- The caller asked for the run when it connected. The run can have changed since, so ask the server.
        run, asked_server = batches.server_run(), true
      end
--: end
      if tonumber(expected_version) > stored_version or stored_run ~= run then
        new_versions[i] = math.max(tonumber(expected_version), stored_version)
      end
      if stored_run ~= run then new_runs[i] = true end
    end
  end
  for i, version in pairs(new_versions) do
    -- Seal the open batch of an earlier run: counts of the new run must not be added to a batch that perhaps lacks
    -- counts of the earlier run.
    if new_runs[i] then batches.seal(string.sub(KEYS[i], 1, -1 - #'${head}'), ARGV[1], run, now) end
    call('SET', KEYS[i], string.format('%.0f', version) .. ' ' .. run)
  end
end
