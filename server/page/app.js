// The page: three panes behind links, of which one is shown.

import * as chat from "./chat.js";
import * as experts from "./experts.js";
import * as models from "./models.js";
import { hasFiles } from "./parts.js";
import { shellOf } from "./shell.js";

const LOOK_MS = 5000; // between two looks at what is loaded
const PANES = { chat, experts, models };
const find = (id) => document.getElementById(id);
const shell = shellOf(find);
const mounted = {};
let current = null;

function show() {
  const named = location.hash.slice(1) || "chat", known = Object.hasOwn(PANES, named);
  if (named === current || (current && !known)) return;
  const name = known ? named : "chat";
  if (current) {
    find(`pane-${current}`).hidden = true;
    mounted[current].hide();
  }
  current = name;
  const section = find(`pane-${name}`);
  mounted[name] ??= PANES[name].mount(section, shell);
  section.hidden = false;
  mounted[name].show();
  document.title = `moeinf: ${name}`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

async function look() {
  if (!document.hidden) await shell.refresh(false);
  setTimeout(look, LOOK_MS);
}

// Move the focus, and leave the address, which names the pane.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  find("main").focus();
});
// A file that is dropped beside the chat would replace the page.
for (const kind of ["dragover", "drop"]) {
  window.addEventListener(kind, (event) => {
    if (event.defaultPrevented || !hasFiles(event)) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "none";
  });
}
window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => document.hidden || shell.refresh(false));
document.addEventListener("models-changed", () => shell.refresh());
await shell.refresh();
show();
setTimeout(look, LOOK_MS);
