// Markdown as DOM nodes. Nothing of the text becomes markup: nodes are made here, and text stays text.

import { copyButton, el } from "./parts.js";

const MOST_INLINE = 20_000; // characters of a paragraph that are searched for marks
const MOST_DEPTH = 6; // of quotes and lists
const MOST_CELLS = 100; // of a table's row
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+([^]*)$/; // `.` ends at U+2028, after each way to share the spaces
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const CELLS = /^\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?$/; // of a trimmed line
// Code, math, links, bold, italic, struck out, escaped; each with a bound, so that a search cannot take long.
const MARK = new RegExp([
  "(?<!`)(`+)([^`]{1,2000})\\1",
  "\\$\\$([^$]{1,2000})\\$\\$|\\\\\\(([^\\n]{1,2000}?)\\\\\\)|\\\\\\[([^]{1,2000}?)\\\\\\]",
  "\\[([^\\[\\]]{1,500})\\]\\(([^\\s()<>]{1,1000})\\)",
  "\\bhttps?://[^\\s<>()\\[\\]\"'`]{1,1000}[^\\s<>()\\[\\]\"'`.,;:!?]",
  "\\*\\*((?:[^*\\n]|\\*(?!\\*)){1,1000}?\\*?)\\*\\*(?!\\*)",
  "(?<![\\w*])\\*([^*\\s][^*\\n]{0,1000})\\*(?![\\w*])",
  "~~([^~\\n]{1,1000})~~",
  "(?<!\\w)_([^_\\s][^_\\n]{0,1000})_(?!\\w)",
  "\\\\([`*_#~|<>$])",
].map((part) => `(?:${part})`).join("|"), "g");

// Return the nodes of a text, each with the lines that it comes from as its `source`.
export function markdown(text) {
  const place = document.createDocumentFragment();
  blocks(text.split(/\r\n?|\n/), place, 0);
  return place;
}

function blocks(lines, place, depth) {
  let at = 0;
  while (at < lines.length) {
    const from = at, last = place.lastChild;
    at = block(lines, at, place, depth);
    if (place.lastChild !== last) place.lastChild.source = lines.slice(from, at).join("\n");
  }
}

// Append the block that begins at a line; return the place of the next.
function block(lines, at, place, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) {
    at = code(lines, at, fence, place);
  } else if (!line.trim()) {
    at += 1;
  } else if (RULE.test(line)) {
    place.append(el("hr"));
    at += 1;
  } else if (/^#{1,6}\s/.test(line)) {
    const level = line.search(/\s/);
    place.append(inline(el(`h${Math.min(6, level + 2)}`), line.slice(level).replace(/\s#+\s*$/, "").trim()));
    at += 1;
  } else if (depth < MOST_DEPTH && /^ {0,3}>/.test(line)) {
    const quoted = taken(lines, at, (one) => /^ {0,3}>/.test(one));
    const quote = el("blockquote");
    blocks(quoted.map((one) => one.replace(/^ {0,3}> ?/, "")), quote, depth + 1);
    place.append(quote);
    at += quoted.length;
  } else if (depth < MOST_DEPTH && ITEM.test(line)) {
    at = list(lines, at, place, depth);
  } else if (line.includes("|") && at + 1 < lines.length && CELLS.test(lines[at + 1].trim())
    && cellsOf(line).length <= MOST_CELLS) {
    at = table(lines, at, place);
  } else {
    const text = taken(lines, at, (one, first) => first || (one.trim() && !FENCE.test(one)
      && !/^#{1,6}\s/.test(one) && !/^ {0,3}>/.test(one) && !ITEM.test(one)));
    place.append(inline(el("p"), text.join("\n").trim()));
    at += text.length;
  }
  return at;
}

// Return the lines from `at` on, as long as they belong.
function taken(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end], end === at)) end += 1;
  return lines.slice(at, end);
}

function code(lines, at, [, fence, language], place) {
  const close = new RegExp(`^ {0,3}${fence[0] === "`" ? "`" : "~"}{${fence.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const copy = copyButton("Copy", () => text, { class: "copy" });
  place.append(el("div", { class: "code" },
    el("div", { class: "code-head" }, el("span", { text: language || "text" }), copy),
    el("pre", { tabindex: "0" }, el("code", { text }))));
  return end + 1;
}

function list(lines, at, place, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const numbered = /\d/.test(mark);
  const node = el(numbered ? "ol" : "ul", numbered ? { start: parseInt(mark, 10) } : {});
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length > indent.length + 1 || item[1].length < indent.length
      || /\d/.test(item[2]) !== numbered) break;
    const width = lines[at].length - item[3].length;
    const inner = [item[3]];
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      const deep = line.length - line.trimStart().length;
      if (line.trim() ? deep <= indent.length && (ITEM.test(line) || !lines[at - 1].trim())
        : !(at + 1 < lines.length && /^\s{2,}\S/.test(lines[at + 1]))) break;
      inner.push(line.slice(Math.min(deep, width)));
      at += 1;
    }
    const entry = el("li");
    blocks(inner, entry, depth + 1);
    node.append(entry);
    while (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at += 1;
  }
  place.append(node);
  return at;
}

// Return the texts of a row's cells, in which a bar may be escaped.
function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((text) => text.replaceAll("\\|", "|"));
}

function table(lines, at, place) {
  const most = cellsOf(lines[at]).length;
  const cells = (line, kind) => {
    const texts = cellsOf(line), last = texts.splice(most - 1).join("|"); // no text is lost
    return [...texts, last].map((text) => inline(el(kind), text.trim()));
  };
  const rows = taken(lines, at + 2, (line) => line.includes("|"));
  place.append(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" },
    el("table", {}, el("thead", {}, el("tr", {}, cells(lines[at], "th"))),
      el("tbody", {}, rows.map((row) => el("tr", {}, cells(row, "td")))))));
  return at + 2 + rows.length;
}

// Append a paragraph's text to a node, with its marks.
function inline(node, text) {
  if (text.length > MOST_INLINE) {
    node.append(text);
    return node;
  }
  let end = 0;
  for (const found of text.matchAll(MARK)) {
    node.append(text.slice(end, found.index));
    end = found.index + found[0].length;
    const [whole, , code, math, math2, math3, name, address, bold, italic, struck, italic2, escaped] = found;
    const formula = math ?? math2 ?? math3;
    if (code !== undefined) node.append(el("code", { text: code }));
    else if (formula !== undefined) node.append(el("code", { class: "math", text: formula.trim() }));
    else if (name !== undefined) node.append(link(name, address) ?? whole);
    else if (bold !== undefined) node.append(inline(el("strong"), bold));
    else if ((italic ?? italic2) !== undefined) node.append(inline(el("em"), italic ?? italic2));
    else if (struck !== undefined) node.append(inline(el("s"), struck));
    else if (escaped !== undefined) node.append(escaped);
    else node.append(link(whole, whole) ?? whole);
  }
  node.append(text.slice(end));
  return node;
}

// Return a link, or nothing where the address is not one of the web or of mail.
function link(text, address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  return el("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank", text });
}
