// The shell that the panes are tested with. Its requests are real, except for the stream of frames.

import * as experts from "./experts.js";
import * as models from "./models.js";

const [LAYERS, EXPERTS, SLOTS, BYTES] = [6, 32, 77, 49152];
window.announced = [];
window.streams = 0;

async function* frames(signal) {
  for (let number = 0; !signal.aborted; number += 1) {
    const cells = Array.from({ length: LAYERS * EXPERTS }, (_, at) =>
      (at < SLOTS ? 1 : 0) | (at % 7 === number % 7 ? 8 : 0) | (at % 16) << 4);
    yield {
      model: shell.model(), layers: LAYERS, experts: EXPERTS, layer_numbers: [2, 3, 4, 5, 6, 7],
      map: btoa(String.fromCharCode(...cells)), hits: 90 * number, misses: 10 * number,
      hit_rate: 0.9, read_bytes_per_s: 2e6 * number, bus_bytes_per_s: 0, in_flight: 1,
      tiers: {
        disk: { experts: LAYERS * EXPERTS - SLOTS }, gpu: null,
        ram: { experts: SLOTS, slots: SLOTS, bytes: SLOTS * BYTES },
      },
      tokens_per_s: 12.3, queue: { running: 1, waiting: 2 }, prediction: { read_bytes: 8, used_bytes: 6, wasted_bytes: 2, hits_hinted: 1, hits_predicted: 2 },
      time: number / 4,
    };
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  window.streams -= 1;
}

const shell = {
  async request(path, { method = "GET", json, signal } = {}) {
    if (path.startsWith("/api/experts?stream=1")) {
      window.streams += 1;
      return frames(signal);
    }
    const headers = json ? { "Content-Type": "application/json" } : {};
    const answer = await fetch(path, { method, signal, headers, body: json && JSON.stringify(json) });
    if (!answer.ok) throw new Error((await answer.json()).error);
    return answer;
  },
  async* lines(answer) {
    if (!(answer instanceof Response)) return yield* answer;
    let rest = "";
    for await (const part of answer.body.pipeThrough(new TextDecoderStream())) {
      const lines = (rest + part).split("\n");
      rest = lines.pop();
      for (const line of lines) yield JSON.parse(line);
    }
  },
  model: () => "demo:bf16",
  onModel(listener) { window.chosen = listener; },
  announce: (text) => window.announced.push(text),
};
const pane = document.getElementById("pane");
window.pane = (location.hash === "#Experts" ? experts : models).mount(pane, shell);
window.pane.show();
