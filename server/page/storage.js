// Texts in the browser's storage, which may be blocked, full, or changed by others.

const kept = new Map(); // of this page, where the browser keeps nothing

// Return a text, or null. storage: "localStorage" or "sessionStorage", where even the name may throw.
export function get(storage, name) {
  if (kept.has(name)) return kept.get(name);
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

export function set(storage, name, text) {
  kept.set(name, text);
  try {
    window[storage].setItem(name, text);
  } catch {
    // It stays for as long as the page is open.
  }
}

// Return the object that a text is the JSON of; {}: there is none.
export function getObject(storage, name) {
  try {
    return Object(JSON.parse(get(storage, name)));
  } catch {
    return {};
  }
}
