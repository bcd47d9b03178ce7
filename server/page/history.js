// The conversations, in this browser only: an IndexedDB with one record each.

import { newId } from "./branches.js";

const NAME = "moeinf", STORE = "talks";

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

async function run(mode, work) {
  const base = await opened();
  try {
    return await new Promise((resolve, reject) => {
      const step = base.transaction(STORE, mode);
      const asked = work(step.objectStore(STORE));
      step.oncomplete = () => resolve(asked?.result);
      step.onerror = step.onabort = () => reject(step.error ?? asked?.error);
    });
  } finally {
    base.close();
  }
}

let last = Promise.resolve(); // the newest conversation that is being kept

// Read after what this tab is about to keep.
function read(work) {
  return last.catch(() => {}).then(() => run("readonly", work));
}

// Return all conversations, the newest first.
export async function all() {
  const found = await read((store) => store.getAll());
  return found.sort((a, b) => b.updated - a.updated);
}

export const get = (id) => read((store) => store.get(id));
export const remove = (id) => run("readwrite", (store) => store.delete(id));
export const clear = () => run("readwrite", (store) => store.clear());

// Keep a conversation, after those before it. Where another tab has kept it since, this is a copy;
// where another tab has deleted it, it stays deleted. Return whether it is kept.
export function put(talk) {
  last = last.catch(() => {}).then(async () => {
    if (talk.gone) return false;
    let changes = null; // of the conversation, once they are kept
    await run("readwrite", (store) => {
      const asked = store.get(talk.id);
      asked.onsuccess = () => {
        if (talk.saved && !asked.result) talk.gone = true;
        if (talk.gone) return;
        changes = { saved: (talk.saved ?? 0) + 1 };
        if (asked.result && asked.result.saved !== talk.saved) {
          Object.assign(changes, { id: newId(), title: `${talk.title} (copy)` });
        }
        store.put({ ...talk, ...changes });
      };
    });
    Object.assign(talk, changes);
    return Boolean(changes);
  });
  return last;
}

// Return what went wrong with a write, in words.
export function wordsOf(error) {
  return error?.name === "QuotaExceededError"
    ? "The browser's storage is full: this chat is not kept. Delete some in History."
    : `The browser keeps no history: ${error?.message ?? error}`;
}
