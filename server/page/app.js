// The page: three panes behind links, of which one is shown.

import * as chat from "./chat.js";
import * as experts from "./experts.js";
import * as models from "./models.js";
import { shellOf } from "./shell.js";

const LOOK_MS = 5000; // between two looks at what is loaded
const PANES = { chat, experts, models };
const find = (id) => document.getElementById(id);
const shell = shellOf(find);
const mounted = {};
let current = null;

function show() {
  const name = Object.hasOwn(PANES, location.hash.slice(1)) ? location.hash.slice(1) : "chat";
  if (name === current) return;
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

window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => document.hidden || shell.refresh());
document.addEventListener("models-changed", () => shell.refresh());
await shell.refresh();
show();
setTimeout(look, LOOK_MS);
