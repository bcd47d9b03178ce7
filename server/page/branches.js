// A conversation as a tree: an edited question or a new answer is another branch, and none is lost.

// Return a name that nothing else has; randomUUID is missing over plain HTTP from another machine.
export const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

export function conversation(model) {
  return {
    id: newId(),
    title: "New chat", model, updated: Date.now(), nodes: {}, chosen: {}, next: 1,
  };
}

const ROOT = "root";

// Add a message below another (null: the first) and choose it; return it.
export function add(talk, parent, message) {
  const node = { ...message, id: String(talk.next), parent: parent?.id ?? ROOT };
  talk.next += 1;
  talk.nodes[node.id] = node;
  talk.chosen[node.parent] = node.id;
  talk.updated = Date.now();
  if (node.role === "user" && node.parent === ROOT) {
    talk.title = node.text.trim().split("\n")[0].slice(0, 60) || "New chat";
  }
  return node;
}

// Return the messages of the chosen branch, in order.
export function path(talk) {
  const found = [];
  for (let id = talk.chosen[ROOT]; id !== undefined; id = talk.chosen[id]) found.push(talk.nodes[id]);
  return found;
}

// Mark answers that a page left unfinished when it was closed.
export function settle(talk) {
  for (const node of Object.values(talk.nodes).filter((one) => one.growing)) {
    delete node.growing;
    delete node.state;
    node.error = "This answer has not ended: its tab was closed, or still receives it.";
  }
  return talk;
}

// Return the messages that stand in the same place, in order.
export function siblings(talk, node) {
  return Object.values(talk.nodes).filter((one) => one.parent === node.parent)
    .sort((a, b) => a.id - b.id);
}

// Choose the message before (-1) or after (1) in the same place.
export function walk(talk, node, by) {
  const all = siblings(talk, node);
  const other = all[all.indexOf(node) + by];
  if (other) talk.chosen[node.parent] = other.id;
}

export function parentOf(talk, node) {
  return talk.nodes[node.parent] ?? null;
}

// Return the messages as /api/chat takes them.
export function messages(talk, upTo, system) {
  const found = system.trim() ? [{ role: "system", content: system }] : [];
  for (const node of path(talk)) {
    const files = (node.files ?? []).map((file) => `File ${file.name}:\n\n${file.text}\n\n`).join("");
    if (node.role === "user") found.push({ role: "user", content: files + node.text });
    else if (node.text || node.calls?.length) {
      found.push({ role: "assistant", content: node.text, ...(node.calls?.length && { tool_calls: node.calls }) });
    }
    if (node === upTo) break;
  }
  return found;
}
