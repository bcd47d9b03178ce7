// The pane Models: what is installed, whether it runs here, and how it comes, is checked and goes.

import { append, bytes, confirmation, el, facts, say } from "./parts.js";
import { planIn } from "./plan.js";

export function mount(section, shell) {
  const name = el("input", {
    id: "panes-name", name: "model", required: true, autocomplete: "off", autocapitalize: "none",
    spellcheck: "false", placeholder: "demo, qwen3-30b-a3b, ORG/NAME",
  });
  const pull = el("button", { type: "submit", text: "Pull" });
  const look = el("button", { type: "button", text: "Plan", click: () => name.reportValidity() && planIn(planned, shell, name.value.trim()) });
  const coming = el("div"), planned = el("div");
  const state = el("p", { class: "panes-state" }), cards = el("ul", { class: "panes-cards" });
  const heading = el("h2", { tabindex: "-1", text: "Models" });
  const ask = confirmation("models-asked");
  section.append(el("div", { class: "panes" }, heading,
    el("form", { class: "panes-pull", submit: begin },
      el("label", { for: "panes-name" }, "A model to add", name), look, pull),
    coming, planned, state, cards, ask.node));
  const checking = new Map(); // the cards of models that are verified now, which stay
  let listing = null, shown = false, failed = false;

  // Pull the model that the form names, one at a time.
  async function begin(event) {
    event.preventDefault();
    const wanted = name.value.trim();
    const path = "/api/pull", done = `${wanted} is pulled.`;
    if (await task(coming, `Pulling ${wanted}`, path, { model: wanted }, () => done, pull, "What was fetched is kept.")) {
      name.value = "";
      planned.replaceChildren();
      changed();
    }
  }

  // Follow the lines of long work in `place`; return whether it ended well. ended: words for the last line;
  // pressed: the button that began it, which cannot begin it twice.
  async function task(place, title, path, json, ended, pressed, kept = "") {
    const control = new AbortController();
    const bar = el("progress", { max: "1", "aria-label": title });
    const words = el("p", { class: "panes-state", text: `${title} …` });
    const cancel = el("button", { type: "button", text: "Cancel", click: () => control.abort() });
    place.replaceChildren(el("div", { class: "panes-task" }, words, bar,
      el("div", { class: "panes-buttons" }, cancel)));
    if (document.activeElement === pressed) cancel.focus();
    pressed.disabled = true;
    shell.announce(`${title} …`);
    let text = "", good = false;
    try {
      const answer = await shell.request(path, { method: "POST", json, signal: control.signal });
      let last = {};
      for await (last of shell.lines(answer)) {
        if (last.error) throw new Error(last.error);
        const { status, total, completed } = last;
        if (total) {
          bar.value = completed / total;
          const part = total > 1 << 16 ? `${bytes(completed)} of ${bytes(total)}` : `${completed} of ${total}`;
          words.textContent = `${title}: ${status}, ${part}`;
        } else if (status !== "success") {
          bar.removeAttribute("value");
          words.textContent = `${title}: ${status}`;
        }
      }
      if (last.status !== "success" && last.status !== "damaged") throw new Error("The server ended the work.");
      good = last.status === "success";
      text = ended(last);
    } catch (error) {
      text = control.signal.aborted ? `${title} was cancelled. ${kept}`.trim() : error.message;
    }
    pressed.disabled = false;
    if (document.activeElement === cancel) pressed.focus();
    place.replaceChildren(say(el("p", { class: good ? "panes-state" : "panes-bad" }), text));
    shell.announce(text);
    return good;
  }

  async function list() {
    listing?.abort();
    failed = false;
    const mine = listing = new AbortController();
    try {
      const get = async (path) => (await shell.request(path, { signal: mine.signal })).json();
      const [{ models }, { models: loaded }] = await Promise.all([get("/api/tags"), get("/api/ps")]);
      if (mine.signal.aborted) return;
      const here = new Set(loaded.map((one) => one.model));
      state.textContent = models.length ? "" : "No model is installed. Type demo above and pull it.";
      const shown = models.map((one) => checking.get(one.model) ?? card(one, here.has(one.model)));
      cards.replaceChildren();
      append(cards, shown);
    } catch (error) {
      if (mine.signal.aborted) return;
      say(state, error.message);
      failed = true;
    }
  }

  function card(model, loaded) {
    const [short, tag] = model.model.split(":"), licence = el("dd", { text: "…" });
    const about = facts([["tag", tag], ["size", bytes(model.size)], ["family", model.details.family],
      ["state", loaded ? "loaded" : "on disk"],
      ["added", new Date(model.modified_at).toLocaleDateString()]]);
    about.append(el("div", {}, el("dt", { text: "licence" }), licence));
    const place = el("div"), planned = el("div"), label = (verb) => `${verb} ${model.model}`;
    const button = (verb, click) => el("button", { type: "button", text: verb, "aria-label": label(verb), click });
    const buttons = el("div", { class: "panes-buttons" },
      button("Plan", () => planIn(planned, shell, model.model)),
      button("Verify", async (event) => {
        checking.set(model.model, node);
        await task(place, `Verifying ${model.model}`, "/api/verify", { model: model.model }, checked, event.currentTarget);
        checking.delete(model.model);
      }),
      button("Delete", (event) => remove(model, place, event.currentTarget)));
    licenceOf(model.model).then((text) => { licence.textContent = text; });
    const node = el("li", { class: "panes-card" }, el("h3", { text: short }), about, buttons, place, planned);
    return node;
  }

  async function licenceOf(model) {
    try {
      const about = await (await shell.request("/api/show", { method: "POST", json: { model } })).json();
      const [first] = (about.license ?? "").trim().split("\n"); // a Modelfile may have the whole text
      return first ? `${first.slice(0, 80)} (its source decides)` : "see its source";
    } catch (error) {
      return error.message;
    }
  }

  function checked({ model, files, damaged }) {
    if (!damaged.length) return `${model}: ${files} files, all as they were pulled.`;
    const found = damaged.map(({ path, problem }) => `${path} ${problem}`).join("; ");
    return `${found}. Type \`moeinf verify ${model} --repair\`, which restores them.`;
  }

  async function remove(model, place, button) {
    const question = `Delete ${model.model}? Its ${bytes(model.size)} and what its use recorded are removed.`;
    if (!await ask.confirmed(question)) return;
    button.disabled = true;
    try {
      await shell.request("/api/delete", { method: "DELETE", json: { model: model.model } });
      shell.announce(`${model.model} is deleted.`);
      await changed();
      heading.focus();
    } catch (error) {
      place.replaceChildren(say(el("p", { class: "panes-bad" }), error.message));
      shell.announce(error.message);
      button.disabled = false;
      if (document.activeElement === document.body) button.focus(); // a disabled one loses it
    }
  }

  // List again, and tell the shell, whose choice of models is another now.
  async function changed() {
    section.dispatchEvent(new CustomEvent("models-changed", { bubbles: true }));
    await list();
  }

  shell.onModel(() => { if (shown && failed) list(); }); // the server is back

  return {
    show() {
      shown = true;
      list();
    },
    hide() {
      if (shown) listing?.abort(); // pulls and checks go on
      shown = false;
    },
  };
}
