// Small pieces that the panes use: DOM nodes, numbers in words, sharp canvases, a question.

// Append to a node. An array may have more children than a call takes arguments.
export function append(node, children) {
  for (const child of children) {
    if (child != null) node.append(child);
  }
  return node;
}

// Return an element; an array stands for its members. Text is set as text, never as markup; a value that is a function is a listener.
export function el(tag, about = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  return append(node, children.flat());
}

// Set the text of a node; parts between backquotes are code.
export function say(node, text) {
  const parts = text.split("`").map((part, number) => (number % 2 ? el("code", { text: part }) : part));
  node.replaceChildren();
  return append(node, parts);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

// Return bytes as the command line shows them.
export function bytes(count) {
  let power = 0;
  while (Math.abs(count) >= 1024 && power < UNITS.length - 1) {
    count /= 1024;
    power += 1;
  }
  return `${power ? count.toFixed(1) : Math.round(count)} ${UNITS[power]}`;
}

export function percent(share, digits = 0) {
  return share == null || Number.isNaN(share) ? "–" : `${(100 * share).toFixed(digits)} %`;
}

// Return a speed with as many digits as it needs.
export function figure(value) {
  if (value == null) return "–";
  return value >= 100 ? value.toFixed(0) : value.toFixed(1);
}

// Return a table with a caption, the names of its columns and rows of texts.
export function table(caption, columns, rows) {
  const head = el("tr", {}, ...columns.map((text) => el("th", { scope: "col", text })));
  const body = rows.map(([first, ...rest]) =>
    el("tr", {}, el("th", { scope: "row", text: first }), ...rest.map((text) => el("td", { text }))));
  return el("div", { class: "panes-scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", { text: caption }), el("thead", {}, head), el("tbody", {}, body)));
}

// Show other nodes in a node. Those at the beginning that come from the same `source` stay, and with them
// the focus and what the user has selected.
export function renew(node, fresh) {
  let same = 0;
  while (same < fresh.length && node.childNodes[same]?.source === fresh[same].source) same += 1;
  while (node.childNodes.length > same) node.lastChild.remove();
  append(node, fresh.slice(same));
}

// Return a button that copies what `text` returns.
export function copyButton(words, text, about = {}) {
  const button = el("button", { type: "button", text: words, ...about });
  button.addEventListener("click", async () => {
    button.textContent = await copied(text()) ? "Copied" : "Not allowed here";
    setTimeout(() => { button.textContent = words; }, 2000);
  });
  return button;
}

async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  // Over plain HTTP from another machine only the selection can be copied.
  const had = document.activeElement, field = el("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  had.focus();
  return done;
}

// Return a list of names with their values.
export function facts(pairs) {
  const list = el("dl", { class: "panes-facts" });
  for (const [name, value] of pairs) {
    list.append(el("div", {}, el("dt", { text: name }), el("dd", { text: value })));
  }
  return list;
}

// Return the context of a canvas of this size in CSS pixels, sharp on every screen.
export function sharp(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

// Return whether files are dragged, and not a text of the page.
export function hasFiles(event) {
  return event.dataTransfer.types.includes("Files");
}

// Return a colour of the style sheet, such as "--panes-ram".
export function colour(node, name) {
  return getComputedStyle(node).getPropertyValue(name).trim();
}

// Return the numbers of a colour of six hexadecimal digits.
export function rgb(text) {
  return [1, 3, 5].map((start) => parseInt(text.slice(start, start + 2), 16));
}

export const calm = window.matchMedia("(prefers-reduced-motion: reduce)");

// A dialog that asks before something is lost. id: of its text; confirmed: whether the answer was yes.
export function confirmation(id) {
  const question = el("p", { id });
  const [no, yes] = [["Keep", "no"], ["Delete", "yes"]].map(([text, value]) => el("button", { value, text }));
  no.autofocus = true;
  const node = el("dialog", { "aria-labelledby": id },
    el("form", { method: "dialog" }, question, el("div", { class: "buttons" }, no, yes)));
  return {
    node,
    confirmed(text) {
      question.textContent = text;
      node.returnValue = "";
      node.showModal();
      return new Promise((resolve) => {
        node.addEventListener("close", () => resolve(node.returnValue === "yes"), { once: true });
      });
    },
  };
}
