-- wrk script: the requests of one scenario, and how many were answered. SCENARIO, SEED, PAUSE_MS: see run.py.
local scenario, seed = os.getenv("SCENARIO"), os.getenv("SEED")
local words = string.rep("when does the ferry leave ", tonumber(os.getenv("WORDS")) / 5)
local fields = os.getenv("FIELDS")
local pause = tonumber(os.getenv("PAUSE_MS"))
local n = 0
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"

function request()
  n = n + 1
  local text = seed .. " " .. n .. " " .. words
  return wrk.format(nil, "/v1/chat/completions", nil, '{"model":"m","messages":[{"role":"user","content":"' .. text .. '"}],' .. fields .. "}")
end

function delay()
  return pause
end

function done(sum)
  local e = sum.errors
  io.write(string.format('{"requests":%d,"failed":%d}\n', sum.requests, e.connect + e.read + e.write + e.status + e.timeout))
end
