// What goes with a question: system prompt, sampling, a schema, and files.

import { bytes, el, hasFiles } from "./parts.js";
import * as storage from "./storage.js";

const KEY = "moeinf-settings";
const MOST_FILE = 512 << 10; // bytes of one text file
const NUMBERS = [
  ["temperature", "Temperature", 0, 5, "any"], ["top_p", "Top p", 0, 1, "any"], ["top_k", "Top k", 0, 1000, 1],
  ["repeat_penalty", "Repeat penalty", 0, 5, "any"], ["seed", "Seed", 0, 2 ** 31, 1],
  ["num_predict", "Most tokens", 1, 1e6, 1], ["num_ctx", "Context", 1, 1e7, 1],
];

// Return the settings' form: its node, `problem()`, and `options()`, `system()`, `format()` of the next request.
export function settings() {
  const kept = storage.getObject("localStorage", KEY);
  const system = el("textarea", { rows: "3", placeholder: "You are …" });
  const schema = el("textarea", { rows: "3", spellcheck: "false", placeholder: "{\"type\": \"object\", …} or json" });
  const wrong = el("p", { class: "bad", role: "alert" });
  const inputs = NUMBERS.map(([name, words, min, max, step]) => {
    const input = el("input", { type: "number", min, max, step, placeholder: "model's own", inputmode: "decimal" });
    input.value = kept[name] ?? "";
    return [name, input, el("label", {}, words, input)];
  });
  system.value = kept.system ?? "";
  schema.value = kept.schema ?? "";
  const node = el("details", { class: "settings" }, el("summary", { text: "Settings" }),
    el("label", {}, "System prompt", system), el("div", { class: "grid" }, ...inputs.map((one) => one[2])),
    el("label", {}, "Answer in JSON: a schema", schema), wrong);
  node.addEventListener("change", () => {
    const values = Object.fromEntries(inputs.map(([name, input]) => [name, input.value]));
    const texts = { system: system.value, schema: schema.value };
    storage.set("localStorage", KEY, JSON.stringify({ ...values, ...texts }));
    wrong.textContent = "";
  });

  // Return the format; undefined: none. Throws SyntaxError.
  function format() {
    const text = schema.value.trim();
    return !text ? undefined : text === "json" ? text : JSON.parse(text);
  }

  return {
    node,
    system: () => system.value,
    // Return what is wrong with a setting, in words, and show it; "": nothing.
    problem() {
      const bad = inputs.find(([, input]) => !input.validity.valid);
      let words = bad ? `${bad[2].firstChild.data}: ${bad[1].validationMessage}` : "";
      try {
        format();
      } catch (error) {
        words ||= `The schema is not JSON: ${error.message}`;
      }
      wrong.textContent = words;
      if (words) node.open = true;
      return words;
    },
    options: () => Object.fromEntries(inputs.filter(([, input]) => input.value !== "")
      .map(([name, input]) => [name, Number(input.value)])),
    format,
  };
}

// Return the place of dropped and chosen text files: its node, `come()`, which waits until they are read, and `take()`.
export function attachments(target, tell) {
  const files = [];
  let reading = Promise.resolve();
  const list = el("ul", { class: "files", "aria-label": "Files to send" });
  const choose = el("input", { type: "file", multiple: true, hidden: true, id: "files" }); // the button opens it
  const button = el("button", { type: "button", text: "File", title: "Send a text file with the question" });
  button.addEventListener("click", () => choose.click());
  choose.addEventListener("change", () => { add(choose.files); choose.value = ""; });
  target.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    target.classList.add("over");
  });
  target.addEventListener("dragleave", () => target.classList.remove("over"));
  target.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    target.classList.remove("over");
    add(event.dataTransfer.files);
  });

  function add(chosen) {
    const all = [...chosen]; // a list of the browser's is emptied
    reading = reading.then(() => read(all));
  }

  async function read(chosen) {
    for (const file of chosen) {
      if (file.size > MOST_FILE) {
        tell(`${file.name} has ${bytes(file.size)}; a file has at most ${bytes(MOST_FILE)}.`);
        continue;
      }
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        files.push({ name: file.name.slice(0, 200), text });
      } catch {
        tell(`${file.name} is not a text in UTF-8.`);
      }
    }
    draw();
  }

  function draw() {
    list.replaceChildren(...files.map((file, at) => {
      const drop = el("button", { type: "button", "aria-label": `Remove ${file.name}`, text: "×" });
      drop.addEventListener("click", () => {
        files.splice(at, 1);
        draw();
        (list.querySelectorAll("button")[Math.min(at, files.length - 1)] ?? button).focus();
      });
      return el("li", {}, `${file.name} (${bytes(new Blob([file.text]).size)})`, drop);
    }));
  }

  return {
    list, button, choose,
    come: () => reading,
    take() {
      const taken = files.splice(0);
      draw();
      return taken;
    },
  };
}
