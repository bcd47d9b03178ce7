// What all panes share: requests with the key, lines of JSON, and the model that is chosen.

import { append } from "./parts.js";
import * as storage from "./storage.js";

const KEY = "moeinf-key";
const CHOSEN = "moeinf-model";
const LOADED = "loaded";
const [WATCH_MS, WATCH_MOST_MS] = [300, 2000]; // between two looks at a model that loads: at first, and at most
const RARER = 1.5; // after each look

// The server does not answer, or its answer was cut off.
export class Unreachable extends Error {
  constructor() {
    super("The server does not answer.");
  }
}

function lost() {
  throw new Unreachable();
}

// Return the shell. Its elements are those of index.html.
export function shellOf(find) {
  const [select, state, said, dialog] = ["model", "state", "said", "key"].map(find);
  const listeners = [];
  let asking = null, answered = 0, shown = null, names = [];
  let away = ""; // why the last look failed

  // Ask for the key once, however many requests were refused. before: the key that was refused;
  // since: how often the user had answered when that request was sent.
  function askKey(before, since) {
    if (!asking && answered > since) return keyOf() !== before;
    asking ??= new Promise((resolve) => {
      if (before) find("key-said").textContent = "The server refused the key before.";
      dialog.addEventListener("close", () => {
        const value = dialog.returnValue === "use" ? find("key-value").value.trim() : "";
        find("key-value").value = "";
        if (value) storage.set("sessionStorage", KEY, value);
        asking = null;
        answered += 1;
        resolve(Boolean(value));
      }, { once: true });
      dialog.returnValue = "";
      dialog.showModal();
    });
    return asking;
  }

  function keyOf() {
    return storage.get("sessionStorage", KEY);
  }

  // ask: whether a refusal may ask the user for a key.
  async function request(path, { method = "GET", json, signal, ask = true } = {}) {
    const headers = {};
    if (json !== undefined) headers["Content-Type"] = "application/json";
    const key = keyOf(), since = answered;
    if (key) headers.Authorization = `Bearer ${key}`;
    const body = json === undefined ? undefined : JSON.stringify(json);
    const answer = await fetch(path, { method, headers, body, signal }).catch(lost);
    if (answer.status === 401 && ask && await askKey(key, since)) return request(path, { method, json, signal });
    if (!answer.ok) throw new Error(await words(answer));
    return answer;
  }

  // Return the server's own words for a refusal.
  async function words(answer) {
    try {
      const { error } = await answer.json();
      return typeof error === "string" ? error : error.message;
    } catch {
      return `The server answered ${answer.status}.`;
    }
  }

  function whole(line) {
    try {
      return JSON.parse(line);
    } catch {
      return lost();
    }
  }

  async function* lines(answer) {
    let rest = "";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    try {
      for (;;) {
        const { done, value } = await reader.read().catch(lost);
        if (done) break;
        const parts = (rest + value).split("\n");
        rest = parts.pop();
        for (const part of parts) if (part) yield JSON.parse(part);
      }
      if (rest.trim()) yield whole(rest);
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  // Fill the selector, which may be open; keep the choice, or take what is loaded or used last.
  // Never throws: the state tells what went wrong. all: also ask which models there are.
  async function refresh(ask = true, all = true) {
    let running, tags;
    try {
      [running, tags] = await Promise.all(
        ["/api/ps", ...all ? ["/api/tags"] : []].map(async (path) => (await request(path, { ask })).json()));
    } catch (error) {
      state.textContent = error.message;
      if (!away) said.textContent = error.message;
      away = error.message;
      return;
    }
    if (tags) names = tags.models.map((one) => one.name);
    const loaded = new Set(running.models.map((one) => one.name));
    const before = select.value || storage.get("localStorage", CHOSEN);
    const states = Object.fromEntries([...loaded].map((name) => [name, LOADED]));
    for (const one of running.loading) states[one.model] ??= loadingWords(one);
    const chosen = names.includes(before) ? before : [...loaded][0] ?? names[0] ?? "";
    // The state of the chosen one stands beside the selector.
    const texts = names.map((name) => states[name] && name !== chosen ? `${name} (${states[name]})` : name);
    if (texts.join("\n") !== shown) {
      shown = texts.join("\n");
      select.replaceChildren();
      append(select, texts.map((text, at) => new Option(text, names[at])));
    }
    select.value = chosen;
    const now = !names.length ? "no model yet: see Models" : states[chosen] ?? "not loaded";
    if (state.textContent !== now) state.textContent = now;
    if (away) said.textContent = "The server answers.";
    if (chosen !== before || away) changed();
    away = "";
  }

  function loadingWords({ read_bytes: read, total_bytes: total }) {
    return total ? `loading, ${Math.floor((100 * read) / total)} %` : "loading";
  }

  // Show how the model loads until the returned function is called.
  function watch() {
    let pause = WATCH_MS, timer = null;
    const look = async () => {
      await refresh(false, false);
      pause = Math.min(WATCH_MOST_MS, RARER * pause);
      if (timer) timer = setTimeout(look, pause);
    };
    timer = setTimeout(look, pause);
    return () => { clearTimeout(timer); timer = null; };
  }

  function changed() {
    storage.set("localStorage", CHOSEN, select.value);
    for (const listener of listeners) listener(select.value);
  }

  select.addEventListener("change", () => { changed(); refresh(); });
  return {
    request, lines, refresh, watch,
    model: () => select.value,
    problem: () => away,
    onModel: (listener) => listeners.push(listener),
    announce: (text) => { said.textContent = text; },
    loaded: () => state.textContent === LOADED,
  };
}
