// The page: one conversation, and the engine's numbers once a second. No other file, no library.

const SAMPLES = 60;
const $ = (id) => document.getElementById(id);

let conversation = []; // messages as the API takes them; a new chat is a new array
let running = null; // the AbortController of the answer under way
let key = sessionStorage.getItem("winnow-key") ?? "";

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

function askForKey(refused) {
  $("key-form").hidden = false;
  $("key-error").hidden = !refused;
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("winnow-key", key);
  $("key").value = "";
  $("key-form").hidden = true;
  refresh();
});

// Chat

function addTurn(role) {
  $("welcome").hidden = true;
  const turn = $("turn").content.firstElementChild.cloneNode(true);
  turn.classList.add(role);
  $("log").append(turn);
  return {
    root: turn,
    reasoning: turn.querySelector(".reasoning"),
    thought: turn.querySelector(".thought"),
    text: turn.querySelector(".text"),
    note: turn.querySelector(".note"),
  };
}

// Text is only ever set as text; a fenced block becomes an element of its own.
function show(element, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  element.replaceChildren(
    ...parts.map((part, i) => {
      if (i % 2 === 0) return document.createTextNode(part);
      const code = document.createElement("pre");
      code.textContent = part.replace(/\n$/, "");
      return code;
    }),
  );
}

function follow(change) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

// Events of a stream, each the JSON after "data: "; ends at [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      if (!event.startsWith(":")) yield JSON.parse(data);
    }
  }
}

function request() {
  const body = {
    messages: conversation,
    stream: true,
    stream_options: { include_usage: true },
    chat_template_kwargs: { thinking_mode: $("thinking").value },
  };
  // An emptied or half-typed field is left to the server.
  if ($("temperature").validity.valid && $("temperature").value !== "") {
    body.temperature = Number($("temperature").value);
  }
  if ($("max-tokens").validity.valid && $("max-tokens").value !== "") {
    body.max_tokens = Number($("max-tokens").value);
  }
  return body;
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function answer(turn, signal) {
  const messages = conversation;
  const began = performance.now();
  const said = { content: "", reasoning: "", reason: null, usage: null, first: null };
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify(request()),
    signal,
  });
  if (response.status === 401) askForKey(Boolean(key));
  if (!response.ok) throw new Error(await failure(response));
  try {
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      said.first ??= performance.now();
      said.usage = chunk.usage ?? said.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      said.reason = choice.finish_reason ?? said.reason;
      said.content += choice.delta.content ?? "";
      said.reasoning += choice.delta.reasoning_content ?? "";
      follow(() => {
        turn.reasoning.hidden = !said.reasoning;
        turn.reasoning.classList.toggle("live", !said.content);
        turn.thought.textContent = said.reasoning.trim();
        show(turn.text, said.content);
      });
    }
  } finally {
    turn.reasoning.classList.remove("live");
    if (said.content || said.reasoning) {
      const message = { role: "assistant", content: said.content };
      if (said.reasoning) message.reasoning_content = said.reasoning;
      messages.push(message);
    }
  }
  turn.note.textContent = summary(said, began);
}

function summary(said, began) {
  const parts = [];
  if (said.usage && said.first !== null) {
    const tokens = said.usage.completion_tokens;
    const seconds = (performance.now() - said.first) / 1000;
    parts.push(`${tokens} tokens`);
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(0)} tokens/s`);
    parts.push(`first after ${Math.round(said.first - began)} ms`);
    const cached = said.usage.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${cached} prompt tokens from the cache`);
  }
  if (said.reason === "length") parts.push("cut at the token limit");
  return parts.join(" · ");
}

function setBusy(busy) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

async function send(text) {
  if (running || !text.trim()) return;
  running = new AbortController();
  const messages = conversation;
  messages.push({ role: "user", content: text });
  show(addTurn("user").text, text);
  const turn = addTurn("assistant");
  turn.root.classList.add("busy");
  $("log").scrollTop = $("log").scrollHeight;
  setBusy(true);
  const { signal } = running;
  try {
    await answer(turn, signal);
  } catch (error) {
    turn.note.textContent = signal.aborted ? "stopped" : error.message;
    turn.note.classList.toggle("error", !signal.aborted);
    // A question without an answer would stand before the next one.
    if (messages.at(-1)?.role === "user") messages.pop();
  }
  turn.root.classList.remove("busy");
  if (running?.signal === signal) {
    running = null;
    setBusy(false);
    $("prompt").focus();
  }
}

function fit() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

$("prompt").addEventListener("input", fit);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  const text = $("prompt").value;
  $("prompt").value = "";
  fit();
  send(text);
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  running?.abort();
  running = null;
  setBusy(false);
  conversation = [];
  $("log").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  $("prompt").focus();
});
for (const starter of document.querySelectorAll(".starters button")) {
  starter.addEventListener("click", () => send(starter.textContent));
}

// The engine's numbers

const rates = new Array(SAMPLES).fill(0);
let last = null; // what came before, to make rates of totals

function draw() {
  const top = Math.max(10, ...rates);
  const points = rates.map((rate, i) => {
    const x = (240 * i) / (SAMPLES - 1);
    return `${x.toFixed(1)},${(54 - (50 * rate) / top).toFixed(1)}`;
  });
  $("spark-line").setAttribute("points", points.join(" "));
  $("spark-area").setAttribute("points", `0,56 ${points.join(" ")} 240,56`);
}

function showStats(stats) {
  const now = performance.now();
  if (last) {
    const seconds = (now - last.now) / 1000;
    rates.push(Math.max(0, stats.generation_tokens - last.stats.generation_tokens) / seconds);
    rates.shift();
  }
  last = { now, stats };
  $("rate").textContent = Math.round(rates.at(-1)).toLocaleString("en");
  draw();
  const share = (pages) => `${stats.pages_total ? (100 * pages) / stats.pages_total : 0}%`;
  $("pages").textContent = stats.pages_used.toLocaleString("en");
  $("pages-total").textContent = stats.pages_total.toLocaleString("en");
  $("pages-cached").textContent = stats.pages_cached.toLocaleString("en");
  $("bar-used").style.width = share(stats.pages_used);
  $("bar-cached").style.width = share(stats.pages_cached);
  $("running").textContent = stats.running;
  $("waiting").textContent = stats.waiting;
  const asked = stats.prefix_query_tokens;
  $("hits").textContent = asked ? Math.round((100 * stats.prefix_hit_tokens) / asked) : 0;
  $("preempted").textContent = stats.preemptions;
  $("model").textContent = stats.ready ? stats.model : `${stats.model}, not ready`;
  $("state").className = stats.ready ? "dot ready" : "dot";
  $("state").title = stats.ready ? "ready" : "not ready";
  $("about").textContent = stats.backend
    ? `Winnow ${stats.version}, backend ${stats.backend}, KV cache ${stats.kv_format}, index ` +
      `${stats.index_format}, up to ${stats.max_model_len.toLocaleString("en")} tokens`
    : "";
}

async function refresh() {
  try {
    const response = await fetch("/stats", { headers: headers() });
    if (response.status === 401) {
      if ($("key-form").hidden) askForKey(Boolean(key));
      return;
    }
    if (response.ok) showStats(await response.json());
  } catch {
    $("state").className = "dot gone";
    $("state").title = "no answer";
    $("model").textContent = "no answer";
  }
}

async function watch() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resume) => setTimeout(resume, 1000));
  }
}

watch();
