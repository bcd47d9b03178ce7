// The pane Chat: questions, streamed answers, their branches, and the history.

import { attachments, settings } from "./ask.js";
import * as tree from "./branches.js";
import * as history from "./history.js";
import { markdown } from "./markdown.js";
import { append, bytes, confirmation, copyButton, el, figure, percent, renew } from "./parts.js";
import { Unreachable } from "./shell.js";

const DRAW_MS = 100; // between two drawings of an answer that grows
const LONG = 20_000; // characters from which drawings are rarer
const KEEP_MS = 3000; // between two keepings of an answer that grows
const MOST_SPOKEN = 5000; // characters of an answer that are announced

export function mount(section, shell) {
  const said = el("div", { class: "talk", role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: "0" });
  const told = el("p", { class: "soft told", role: "alert" });
  const text = el("textarea", { id: "question", rows: "2", placeholder: "Ask something", "aria-label": "Your question" });
  const send = el("button", { type: "submit", class: "main", text: "Send" });
  const stop = el("button", { type: "button", text: "Stop", hidden: true });
  const chosen = settings();
  const files = attachments(section, (words) => { told.textContent = words; });
  const form = el("form", { class: "ask", novalidate: true }, files.list, text,
    el("div", { class: "buttons" }, files.button, files.choose, stop, send), chosen.node);
  const fresh = el("button", { type: "button", text: "New chat", click: () => open(tree.conversation(shell.model())) });
  const kept = el("div"); // not the summary, which would lose the focus
  const past = el("details", { class: "past" }, el("summary", { text: "History" }), kept);
  const ask = confirmation("chats-asked");
  section.append(el("div", { class: "bar" }, fresh, past), said, told, form, ask.node);
  const unfolded = new WeakSet(); // the messages whose thinking the user has opened
  const drafts = new WeakMap(); // changed questions that are not asked yet, by their messages
  let talk = tree.conversation(shell.model()), control = null;

  function open(other) {
    control?.abort();
    free();
    talk = tree.settle(other);
    told.textContent = "";
    draw(true);
    text.focus();
  }

  // Let the user ask again. The focus stays where it was, on the button in the same place.
  function free() {
    const had = document.activeElement === stop;
    control = null;
    stop.hidden = true;
    send.disabled = false;
    if (had) send.focus();
  }

  // Return whether a question can be asked now; say why not.
  function ready() {
    if (control) return false;
    if (!shell.model()) shell.refresh(); // which may ask for the key
    told.textContent = shell.model() ? chosen.problem()
      : shell.problem() || "There is no model yet: Models can pull one.";
    return !told.textContent;
  }

  // Return whether the end of the conversation is in view.
  function atEnd() {
    return said.scrollHeight - said.scrollTop - said.clientHeight < 80;
  }

  // Draw the conversation. Messages that are shown already stay, with what the user has selected in them. The focus
  // stays on what has the same name in the same message. end: go to the end, where the view also stays.
  function draw(end = atEnd()) {
    const from = said.scrollTop, shown = [...said.children], nodes = tree.path(talk);
    const had = document.activeElement, box = had.closest(".talk > article");
    const at = shown.indexOf(box), named = nameOf(had);
    let same = 0;
    while (same < nodes.length && shown[same]?.node === nodes[same]) shown[same++].renew();
    shown.slice(same).forEach((other) => other.remove());
    append(said, nodes.slice(same).map(messageOf));
    if (!nodes.length) {
      said.append(el("p", { class: "empty", text: "Answers come from this machine. Nothing leaves it." }));
    }
    said.scrollTop = end ? said.scrollHeight : from;
    if (!box || had.isConnected) return;
    const again = [...said.children[at]?.querySelectorAll("button") ?? []].find((one) => nameOf(one) === named && !one.disabled);
    (again ?? text).focus({ preventScroll: true });
  }

  // Return the element of a message; `update` draws the parts that grow, `renew` all that can change.
  function messageOf(node) {
    const own = node.role === "user";
    const body = el("div", { class: "body" });
    const thought = el("div", { class: "thought" });
    const fold = () => unfolded[thinking.open ? "add" : "delete"](node);
    const thinking = el("details", { class: "thinking", hidden: true, open: unfolded.has(node), toggle: fold },
      el("summary", { text: "Thinking" }), thought);
    const foot = el("p", { class: "soft figures" });
    const box = el("article", { class: own ? "own" : "answer", "aria-label": own ? "You" : "Answer" },
      ...(node.files ?? []).map((file) => el("p", { class: "file", text: file.name })), thinking, body, foot);
    box.update = () => {
      thinking.hidden = !node.thinking;
      if (thought.textContent !== (node.thinking ?? "")) thought.textContent = node.thinking ?? "";
      if (own && body.textContent !== node.text) body.textContent = node.text;
      if (!own) renew(body, [...markdown(node.text).childNodes, ...(node.calls ?? []).map(callOf)]);
      foot.textContent = node.error ?? node.state ?? figures(node);
      foot.classList.toggle("bad", Boolean(node.error));
    };
    box.renew = () => {
      box.update();
      foot.nextSibling?.remove();
      box.append(actionsOf(node, own, box));
    };
    box.node = node;
    box.renew();
    return box;
  }

  function actionsOf(node, own, box) {
    const all = tree.siblings(talk, node), at = all.indexOf(node);
    const busy = control ? "true" : null; // not `disabled`: the focus would leave
    const step = (by, words, sign) => el("button", {
      type: "button", "aria-label": words, disabled: !all[at + by], "aria-disabled": busy, text: sign,
      click: () => { if (!control) { tree.walk(talk, node, by); keep(); draw(); } },
    });
    const branches = all.length > 1
      ? [step(-1, "Earlier version", "‹"), el("span", { text: `${at + 1}/${all.length}` }), step(1, "Later version", "›")] : [];
    const [verb, click] = own ? ["Edit", () => control || edit(node, box)]
      : [node.error ? "Retry" : "Regenerate", () => ready() && answer(tree.parentOf(talk, node))];
    const change = el("button", { type: "button", text: verb, "aria-disabled": busy, click });
    const copy = own ? null : copyButton("Copy answer", () => node.text);
    return el("div", { class: "actions" }, copy, ...branches, change);
  }

  // Let the user change a question; its old version stays as another branch.
  function edit(node, box) {
    const draft = () => drafts.set(node, field.value);
    const field = el("textarea", { rows: "3", "aria-label": "Changed question", input: draft });
    field.value = drafts.get(node) ?? node.text;
    const done = el("button", { type: "button", class: "main", text: "Ask again", click: () => {
      if (!field.value.trim() || !ready()) return;
      drafts.delete(node);
      answer(tree.add(talk, tree.parentOf(talk, node), { role: "user", text: field.value, files: node.files }));
    } });
    const back = el("button", { type: "button", text: "Cancel", click: () => {
      drafts.delete(node);
      delete box.node; // the message is drawn again
      draw();
    } });
    box.renew = () => {}; // the field stays while the conversation grows
    box.replaceChildren(field, el("div", { class: "buttons" }, back, done));
    field.focus();
  }

  // Answer a question, which is in the tree, after `ready`.
  async function answer(question) {
    const node = { role: "assistant", text: "", thinking: "", calls: [], model: shell.model(), growing: true };
    const asked = {
      model: node.model, messages: tree.messages(talk, question, chosen.system()),
      options: chosen.options(), format: chosen.format(),
    };
    const mine = talk, added = tree.add(mine, question, node);
    const own = control = new AbortController();
    stop.hidden = false;
    if (document.activeElement === send) stop.focus();
    send.disabled = true;
    added.state = shell.loaded() ? "Waiting for the answer …" : "Loading the model …";
    draw(true);
    keep(mine);
    const drawn = follow(added, mine), seen = shell.watch();
    try {
      const response = await shell.request("/api/chat", { method: "POST", json: asked, signal: own.signal });
      let ended = false;
      for await (const line of shell.lines(response)) {
        seen(); // it is loaded
        if (line.error) throw new Error(line.error);
        heard(added, line);
        ended = line.done;
        drawn.soon();
      }
      if (!ended) throw new Error("The server ended before the answer did.");
    } catch (error) {
      if (own.signal.aborted) added.state = "Stopped.";
      else added.error = error.message + (error instanceof Unreachable && added.text ? " What came is kept." : "");
    }
    seen();
    if (!own.signal.aborted) delete added.state;
    delete added.growing;
    drawn.end();
    if (control === own) free();
    shell.announce(added.error ?? added.state ?? `Answer: ${added.text.slice(0, MOST_SPOKEN)}`);
    await keep(mine);
    if (talk === mine && !control) draw();
    shell.refresh();
  }

  function heard(node, line) {
    const { message = {}, prompt_progress: progress } = line;
    node.text += message.content ?? "";
    node.thinking += message.thinking ?? "";
    if (message.tool_calls) node.calls = node.calls.concat(message.tool_calls);
    if (progress) {
      node.state = `Reading the prompt: ${progress.processed} of ${progress.total} tokens`;
    } else if (line.done) {
      node.figures = line;
      delete node.figures.message;
    } else {
      delete node.state;
    }
  }

  // Draw an answer while it grows, not for every token.
  function follow(node, mine) {
    let timer = null, kept = Date.now();
    const update = () => {
      timer = null;
      if (node.growing && Date.now() - kept > KEEP_MS) {
        kept = Date.now();
        keep(mine);
      }
      const box = said.lastElementChild;
      if (talk !== mine || !box?.update) return;
      const near = atEnd();
      box.update();
      if (near) said.scrollTop = said.scrollHeight;
    };
    return {
      soon: () => { timer ??= setTimeout(update, node.text.length > LONG ? 10 * DRAW_MS : DRAW_MS); },
      end: () => { clearTimeout(timer); update(); },
    };
  }

  async function keep(mine = talk) {
    try {
      const before = mine.gone;
      if (!await history.put(mine) && !before && talk === mine) {
        told.textContent = "Another tab deleted this chat: what is said from now on is not kept.";
      }
    } catch (error) {
      told.textContent = history.wordsOf(error);
    }
    if (past.open && !control) list();
  }

  // Show the conversations that the browser keeps.
  async function list() {
    let talks = [];
    try {
      talks = await history.all();
    } catch (error) {
      told.textContent = history.wordsOf(error);
    }
    const rows = talks.map(({ id, title }) => el("li", {},
      el("button", { type: "button", class: "plain", text: title, click: () => tried(() => recall(id)) }),
      el("button", { type: "button", "aria-label": `Delete ${title}`, text: "Delete", click: async () => {
        if (await ask.confirmed(`Delete the chat ${title}?`)) erase(id === talk.id, () => history.remove(id));
      } })));
    kept.replaceChildren(el("ul", {}, rows), el("div", { class: "buttons" },
      el("button", { type: "button", text: "Export", disabled: !talks.length,
        click: () => tried(async () => save(await history.all())) }),
      el("button", { type: "button", text: "Delete all", disabled: !talks.length, click: async () => {
        if (await ask.confirmed(`Delete all ${talks.length} chats of this browser?`)) erase(true, history.clear);
      } })));
  }

  // Do something with the history, and return whether it went well; say why not.
  async function tried(work) {
    try {
      await work();
      return true;
    } catch (error) {
      told.textContent = history.wordsOf(error);
      return false;
    }
  }

  // Open a conversation as it is now: another tab may have changed it since the list was drawn.
  async function recall(id) {
    if (id !== talk.id) {
      const found = await history.get(id);
      if (!found) {
        told.textContent = "Another tab deleted this chat.";
        return list();
      }
      open(found);
    }
    past.open = false;
  }

  // Delete conversations. own: the one that is shown is among them; it is left for an empty one.
  async function erase(own, work) {
    const mine = talk, before = mine.gone;
    if (own) mine.gone = true; // nothing keeps it meanwhile
    if (!await tried(work)) {
      if (own) mine.gone = before;
      return;
    }
    if (own && talk === mine) open(tree.conversation(shell.model()));
    past.firstElementChild.focus();
    list();
  }

  // Take over what another tab has added to the conversation.
  async function follows() {
    const busy = () => control || said.querySelector("textarea"); // an answer or an edit
    if (document.hidden || busy()) return;
    const found = await history.get(talk.id).catch(() => null);
    if (!found || busy() || found.id !== talk.id || found.saved === talk.saved) return;
    talk = tree.settle(found);
    draw();
  }

  function save(talks) {
    const address = URL.createObjectURL(new Blob([JSON.stringify(talks, null, 1)], { type: "application/json" }));
    el("a", { href: address, download: "moeinf-chats.json" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    await files.come(); // those that were dropped just now
    const question = text.value;
    if (!question.trim() || !ready()) return;
    text.value = "";
    const last = tree.path(talk).at(-1) ?? null;
    answer(tree.add(talk, last, { role: "user", text: question, files: files.take() }));
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  stop.addEventListener("click", () => control?.abort());
  document.addEventListener("visibilitychange", follows);
  past.addEventListener("toggle", () => past.open && list());
  return {
    // Open the newest conversation at first.
    async show() {
      text.focus();
      if (said.childElementCount) return;
      draw(true);
      const [newest] = await history.all().catch(() => []);
      if (newest && !tree.path(talk).length) open(newest);
    },
    hide() {},
  };
}

// Return the name by which a control is found again.
function nameOf(node) {
  return node.getAttribute("aria-label") ?? node.textContent;
}

function callOf(call) {
  const { name, arguments: values } = call.function;
  const text = JSON.stringify(values, null, 1);
  const node = el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", { text: `Tool call: ${name}` })),
    el("pre", { tabindex: "0" }, el("code", { text })));
  node.source = `${name} ${text}`;
  return node;
}

// Return an answer's figures in a line.
function figures({ figures: line, model }) {
  if (!line?.eval_count) return "";
  const parts = [model], steps = line.eval_count - 1; // the prompt's last pass gives the first token
  if (steps && line.eval_duration) parts.push(`${figure(steps / (line.eval_duration / 1e9))} tokens/s`);
  if (line.expert_uses) {
    parts.push(`${percent(line.expert_hits / line.expert_uses, 1)} hits`, `${bytes(line.expert_bytes_read)} read`);
  }
  if (line.done_reason === "length") parts.push("cut off at the most tokens");
  return parts.join(" · ");
}
