// The plan of a model, as `moeinf plan` prints it: the verdict, its figures, other memory, other tags.

import { bytes, el, facts, figure, say, table } from "./parts.js";

const TIERS = { device: "GPU", ram: "RAM" };

// Show the plan in `place`, or the error, unless something else is shown there meanwhile.
export async function planIn(place, shell, model) {
  const busy = el("p", { class: "panes-state", text: `Planning ${model} …` });
  place.replaceChildren(busy);
  shell.announce(busy.textContent);
  let node;
  try {
    const answer = await shell.request("/api/plan", { method: "POST", json: { model } });
    node = shown(await answer.json());
  } catch (error) {
    node = say(el("p", { class: "panes-bad" }), error.message);
  }
  if (busy.parentNode !== place) return;
  place.replaceChildren(node);
  shell.announce(node.classList.contains("panes-bad") ? node.textContent : node.firstChild.textContent);
}

function shown(plan) {
  const node = el("div", { class: "panes-plan" },
    el("p", { class: plan.runs ? "panes-verdict" : "panes-verdict panes-bad", text: plan.verdict }),
    plan.try ? say(el("p"), `Try: ${plan.try}`) : null,
    facts([
      ["RAM", `${bytes(plan.needed_ram_bytes)} needed, ${bytes(plan.machine.free_ram_bytes)} free`],
      ["disk", `${bytes(plan.disk_bytes)}, ${bytes(plan.machine.free_disk_bytes)} free`],
      ...plan.download_bytes ? [["download", bytes(plan.download_bytes)]] : [],
      ...plan.tiers.map((tier) => [`experts, ${TIERS[tier.name] ?? tier.name}`,
        `${tier.experts}, ${bytes(tier.bytes)}`]),
      ["least memory", bytes(plan.min_memory_bytes)],
      ["KV cache", `${bytes(plan.kv_bytes)} for ${plan.context} tokens`],
      ["decoding, measured", speed(plan.expected_tokens_per_s)],
      ["decoding, bound", speed(plan.bound_tokens_per_s)],
    ]),
    table("With other memory for experts", ["Memory", "Experts in RAM", "Fits", "Decoding at most", "Measured"],
      plan.ladder.map((rung) => [bytes(rung.memory_bytes), `${rung.experts_in_ram}`, rung.fits ? "yes" : "no",
        speed(rung.bound_tokens_per_s), speed(rung.measured_tokens_per_s)])));
  if (plan.tags.length) {
    node.append(table("Tags", ["Tag", "On disk", "Least memory", "Decoding at most", "Fits"],
      plan.tags.map((row) => [row.tag, bytes(row.disk_bytes), bytes(row.min_memory_bytes),
        speed(row.bound_tokens_per_s), row.fits ? "yes" : Object.values(row.problems).join("; ")])));
  }
  for (const note of plan.notes) node.append(el("p", { class: "panes-state", text: note }));
  return node;
}

function speed(tokens) {
  return tokens == null ? "–" : `${figure(tokens)} tokens/s`;
}
