// The pane Experts: where each expert of the chosen model is, what it is used for, and the memory for it.

import { curve, spark } from "./charts.js";
import { heatMap } from "./heatmap.js";
import { bytes, el, facts, figure, percent, say } from "./parts.js";

const RETRY_MS = 2000;
const WINDOW_S = 2; // of the hit rate that is shown
const MB = 1e6;

export function mount(section, shell) {
  const state = el("p", { class: "panes-state" });
  const map = heatMap((text) => shell.announce(text));
  const hits = spark("Hit rate", (value) => percent(value, 1), 1);
  const disk = spark("Disk", (value) => `${figure(value)} MB/s`);
  const bars = tiers();
  const numbers = el("div");
  const guess = el("p", { class: "panes-guess" });
  const promise = curve();
  const said = el("p", { class: "panes-state" });
  const memory = slider(shell, promise, () => last);
  const pause = el("button", { type: "button", class: "panes-pause", "aria-pressed": "false", text: "Pause" });
  const live = el("div", { class: "panes-live", hidden: true }, ...map.nodes,
    el("div", { class: "panes-row" }, hits.node, disk.node, bars.node), numbers, guess, memory.node);
  section.append(el("div", { class: "panes" },
    el("div", { class: "panes-head" }, el("h2", { text: "Experts" }), pause), state, live,
    el("h3", { text: "Hit rate over memory" }), said, promise.node));

  let shown = false, paused = false, stop = null, retry = 0, last = null, curved = null, asking = null;
  let counts = [];

  function frame(next) {
    if (!next.model || !next.map) return absent();
    if (!last || last.model !== next.model) forget();
    last = next;
    live.hidden = false;
    state.textContent = next.queue && next.queue.waiting
      ? `${next.model}: ${next.queue.running} running, ${next.queue.waiting} waiting` : next.model;
    map.show(next);
    bars.show(next);
    const rate = recent(next);
    hits.add(next.time, rate);
    disk.add(next.time, next.read_bytes_per_s / MB);
    numbers.replaceChildren(facts(figures(next)));
    guess.textContent = predicted(next.prediction);
    memory.follow(next);
    promise.mark(next.tiers.ram.slots / (next.layers * next.experts), rate);
  }

  // Return the hit rate of the last seconds, or null if no expert was asked for.
  function recent({ time, hits: hit, misses }) {
    if (counts.length && hit + misses < counts.at(-1)[1] + counts.at(-1)[2]) counts = [];
    counts.push([time, hit, misses]);
    while (counts.length > 2 && counts[1][0] < time - WINDOW_S) counts.shift();
    const [, before, without] = counts[0], asked = hit - before + misses - without;
    return asked ? (hit - before) / asked : null;
  }

  function forget() {
    counts = [];
    last = null;
    hits.clear();
    disk.clear();
  }

  function absent(words) {
    live.hidden = true;
    forget();
    const name = shell.model();
    say(state, words || (name
      ? `${name} is not loaded. Its first answer in Chat loads it.` : "Choose a model first."));
  }

  // ask: whether a refusal may ask the user for a key; not again and again.
  async function watch(ask = true) {
    stop?.abort();
    clearTimeout(retry);
    if (!shown || paused || document.hidden) return;
    const mine = stop = new AbortController(), name = shell.model();
    try {
      const query = name ? `&model=${encodeURIComponent(name)}` : "";
      const answer = await shell.request(`/api/experts?stream=1${query}`, { signal: mine.signal, ask });
      for await (const next of shell.lines(answer)) {
        if (mine.signal.aborted) return;
        if (next.error) throw new Error(next.error);
        frame(next);
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      absent(error.message);
    }
    if (mine.signal.aborted) return;
    retry = setTimeout(() => watch(false), RETRY_MS);
  }

  async function replay() {
    const name = shell.model();
    if (!shown || !name || curved === name) return;
    asking?.abort();
    const mine = asking = new AbortController();
    curved = name;
    promise.clear();
    said.textContent = `Replaying the recording of ${name} …`;
    try {
      const path = `/api/simulate?model=${encodeURIComponent(name)}`;
      const found = await (await shell.request(path, { signal: mine.signal })).json();
      if (mine.signal.aborted) return;
      promise.show(found);
      const { trace } = found, when = new Date(found.recorded_at).toLocaleString();
      say(said, `From ${trace.tokens} tokens that \`moeinf trace\` recorded (${trace.name}, ${when}).`);
      memory.tell();
    } catch (error) {
      if (mine.signal.aborted) return;
      curved = null;
      say(said, error.message);
    }
  }

  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", `${paused}`);
    watch();
  });
  document.addEventListener("visibilitychange", () => watch(false));
  shell.onModel(() => {
    absent(paused ? "Paused." : "");
    asking?.abort();
    curved = null;
    promise.clear();
    said.textContent = "";
    memory.know();
    watch();
    replay();
  });

  return {
    show() {
      shown = true;
      memory.know();
      watch();
      replay();
    },
    hide() {
      shown = false;
      asking?.abort();
      if (!promise.promise(1)) curved = null; // it was stopped
      watch();
    },
  };
}

function figures(next) {
  const pairs = [["tokens/s", figure(next.tokens_per_s)], ["hit rate since the load", percent(next.hit_rate, 1)],
    ["being read", `${next.in_flight}`]];
  if (next.tiers.gpu) pairs.push(["bus", `${figure(next.bus_bytes_per_s / MB)} MB/s`]);
  if (next.queue) pairs.push(["requests", `${next.queue.running} running, ${next.queue.waiting} waiting`]);
  return pairs;
}

// Say what the prediction was right about, from its counts.
function predicted(counts) {
  if (!counts?.read_bytes) return "";
  const { read_bytes: read, used_bytes: used, wasted_bytes: wasted, hits_hinted: hinted, hits_predicted: far } = counts;
  const ends = used + wasted;
  return `Read ahead: ${bytes(read)}. ${ends ? `${percent(used / ends)} of what is settled was used. ` : ""}`
    + `Hits by it: ${hinted} from the next layer's gate, ${far} from the prediction.`;
}

// Bars of the experts on the GPU, in RAM and only on disk.
function tiers() {
  const bar = (name) => {
    const words = el("output"), about = { max: "1", value: "0", "aria-label": name };
    const meter = el("progress", { class: `panes-in${name.slice(0, 3)}`, ...about });
    return { node: el("div", { class: "panes-bar" }, el("span", { text: name }), meter, words), meter, words };
  };
  const [gpu, ram, disk] = [bar("GPU"), bar("RAM"), bar("Disk only")];
  const fill = ({ meter, words }, count, whole, text) => {
    meter.value = count / whole;
    words.textContent = text;
  };
  return {
    node: el("div", { class: "panes-bars" }, gpu.node, ram.node, disk.node),
    show({ tiers: found, layers, experts }) {
      const whole = layers * experts;
      const held = ({ experts: count, slots, bytes: size }) => `${count} of ${slots} slots, ${bytes(size)}`;
      gpu.node.hidden = !found.gpu;
      if (found.gpu) fill(gpu, found.gpu.experts, whole, held(found.gpu));
      fill(ram, found.ram.experts, whole, held(found.ram));
      fill(disk, found.disk.experts, whole, `${found.disk.experts} of ${whole}`);
    },
  };
}

// The slider for the memory of the model's experts, with what replays promise for it.
function slider(shell, promise, last) {
  const range = el("input", { type: "range", min: "1", max: "100", step: "1", value: "100", id: "panes-memory" });
  const words = el("output", { for: "panes-memory", class: "panes-promise" });
  const auto = el("button", { type: "button", text: "Automatic" });
  const told = el("p", { class: "panes-state" });
  const node = el("fieldset", { class: "panes-memory" }, el("legend", { text: "Memory for experts" }),
    el("label", { for: "panes-memory", text: "RAM" }), range, words, auto, told);
  let sizes = null, held = false, known = null, wanted = null; // held: by a pointer

  function tell() {
    const share = range.valueAsNumber / 100, rate = promise.promise(share);
    const size = sizes ? `${bytes(share * sizes.whole)}, ` : "";
    words.textContent = `${size}${range.value} % of the experts`
      + (rate == null ? "" : `; replays promise ${percent(rate)} hits`);
    range.setAttribute("aria-valuetext", words.textContent);
  }

  async function know() {
    const name = shell.model();
    if (!name || known === name) return;
    known = name;
    sizes = null;
    told.textContent = "";
    try {
      const json = { model: name }, about = await (await shell.request("/api/show", { method: "POST", json })).json();
      if (known !== name) return;
      const info = about.model_info;
      sizes = { whole: info["moeinf.experts_bytes"], least: info["moeinf.least_memory_bytes"] };
      range.min = `${Math.min(100, Math.ceil(100 * sizes.least / sizes.whole))}`;
    } catch (error) {
      known = null;
      say(told, error.message);
    }
    tell();
  }

  // Move to the newest wish; the slider stays usable meanwhile.
  async function set(memory) {
    const busy = wanted != null;
    if (!last()) return; // the stream has ended, and the slider is hidden
    wanted = { model: last().model, memory };
    if (busy) return;
    while (wanted != null) {
      const asked = wanted;
      tell_of(asked, "Moving …");
      try {
        const now = await (await shell.request("/api/memory", { method: "POST", json: asked })).json();
        tell_of(asked, `${now.slots} of ${now.experts} experts fit in ${bytes(now.memory)}`
          + (now.auto ? ", chosen automatically." : "."));
      } catch (error) {
        tell_of(asked, error.message);
        if (wanted === asked && last()) show(last());
      }
      if (wanted === asked) wanted = null;
    }
    shell.announce(told.textContent);
  }

  // Tell about a move where its model is still the chosen one.
  function tell_of({ model }, text) {
    if (model === shell.model()) say(told, text);
  }

  // Show the share of the experts that fit now.
  function show({ tiers: { ram }, layers, experts }) {
    range.value = `${Math.round(100 * ram.slots / (layers * experts))}`;
    tell();
  }

  range.addEventListener("input", tell);
  range.addEventListener("pointerdown", () => { held = true; });
  for (const kind of ["pointerup", "pointercancel"]) window.addEventListener(kind, () => { held = false; });
  range.addEventListener("change", () => set(`${range.value}%`));
  auto.addEventListener("click", () => set("auto"));
  return {
    node, tell, know,
    follow(next) {
      if (!held && wanted == null && document.activeElement !== range) show(next);
    },
  };
}
