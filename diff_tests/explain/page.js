"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const UNUSED = 0, FREE = 1, CACHED = 2, HELD = 3, SHARED = 4, DEFERRED = 5;
  const STATE_WORDS = ["never used", "free", "free, can still be hit", "held", "shared", "waits to be freed"];
  const KIND_NAMES = ["taken", "hit", "copied", "computed", "selected", "written", "zeroed", "cached", "uncached", "left", "wrong"];
  // What a cell shows where there is room for a letter: the first of these that happened in it.
  const LETTERS = [["wrong", "!", "wrong"], ["written", "W", "written by the connector"], ["selected", "S", "selected"],
    ["copied", "C", "copy"], ["hit", "H", "hit"], ["taken", "T", "taken"]];
  const GUTTER_LEFT = 54, GUTTER_TOP = 24, MAX_HEIGHT = 560, FOLD_AT = 16, MOST_REQUESTS = 4;

  /** An element with text, attributes and children; text never becomes markup. */
  function make(tag, options = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(options)) {
      if (name === "text") element.textContent = value;
      else if (name === "click") element.addEventListener("click", value);
      else if (value !== undefined && value !== false) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  // ------------------------------------------------------------------------------------------------------------ state

  const steps = data.steps.length ? [...data.steps, data.steps[data.steps.length - 1] + 1] : [];
  const columnOf = new Map(steps.map((step, column) => [step, column]));
  const lastStep = data.steps[data.steps.length - 1] || 0;
  const used = Object.keys(data.cells).map(Number);
  const wrongCells = new Set(data.focus.wrong.map(([step, block]) => `${block} ${step}`));
  const chosen = { step: data.focus.step, block: null, request: -1, group: -1, only: false };
  let shownStep = null, rows = [], rowOf = new Map(), cellWidth = 8, cellHeight = 8, image = null;
  const eventsOf = new Map();

  const stepName = (step) => (step > lastStep ? "end" : String(step));
  const requestName = (index) => (index < 0 ? "nobody" : data.requests[index]);

  /** Which kinds of events a block saw, by step. */
  function eventsBySteps(block) {
    if (!eventsOf.has(block)) {
      const events = new Map();
      for (const [step, , kind] of data.lives[block] || []) {
        if (!events.has(step)) events.set(step, new Set());
        events.get(step).add(KIND_NAMES[kind]);
      }
      eventsOf.set(block, events);
    }
    return eventsOf.get(block);
  }

  /** [state, owner] of a block after scheduling in a step. */
  function stateAt(block, step) {
    const cells = data.cells[block] || [];
    let found = [UNUSED, -1];
    for (let i = 0; i < cells.length && cells[i] <= step; i += 3) found = [cells[i + 1], cells[i + 2]];
    return found;
  }

  // Entries of block tables by request, to rebuild any table at any step.
  const changesOf = data.requests.map(() => []);
  for (const change of data.changes) changesOf[change[1]].push(change);

  /** A request's tables after a step: per group a list of [block, origin], or null if it holds nothing. */
  function tablesAt(request, step) {
    const tables = data.groups.map(() => []);
    for (const [at, , group, position, block, origin] of changesOf[request]) {
      if (at > step) break;
      if (block < 0) tables[group].length = position;
      else tables[group][position] = [block, origin];
    }
    return tables.some((table) => table.length) ? tables : null;
  }

  /** Blocks that the filters keep: those that the request ever had in the group, or held the tokens of. */
  const keptBlocks = () => {
    if (chosen.request < 0 && chosen.group < 0) return null;
    const kept = new Set();
    for (const [, request, group, , block] of data.changes) {
      if (block > 0 && (chosen.request < 0 || request === chosen.request) && (chosen.group < 0 || group === chosen.group)) kept.add(block);
    }
    return kept;
  };

  // ----------------------------------------------------------------------------------------------------------- colours

  const HUES = [214, 28, 152, 284, 50, 188, 338, 96, 252, 8];
  const hueOf = (owner) => (owner < HUES.length ? HUES[owner] : Math.round(owner * 137.508) % 360);
  function hsl(owner, state) {
    if (state === UNUSED) return [0, 0, 98.5];
    if (state === FREE || owner < 0) return [220, 6, 91];
    if (state === DEFERRED) return [hueOf(owner), 18, 68];
    return [hueOf(owner), 62, state === CACHED ? 88 : state === HELD ? 62 : 42];
  }
  const css = ([hue, saturation, light]) => `hsl(${hue} ${saturation}% ${light}%)`;
  const packed = new Map();
  function pack(owner, state, dim) {
    const key = (owner + 1) * 16 + state * 2 + (dim ? 1 : 0);
    if (!packed.has(key)) {
      let [hue, saturation, light] = hsl(owner, state);
      if (dim) [saturation, light] = [saturation * 0.25, 95 + light * 0.03];
      const a = (saturation / 100) * Math.min(light / 100, 1 - light / 100);
      const channel = (n) => {
        const k = (n + hue / 30) % 12;
        return Math.round(255 * (light / 100 - a * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
      };
      packed.set(key, (255 << 24) | (channel(4) << 16) | (channel(8) << 8) | channel(0));
    }
    return packed.get(key);
  }

  // -------------------------------------------------------------------------------------------------------------- map

  const pool = byId("pool"), canvas = byId("canvas"), context = canvas.getContext("2d");

  /** Which rows there are, and one pixel a cell in an image that is scaled when drawn. */
  function rebuild() {
    const kept = keptBlocks();
    rows = used.filter((block) => !kept || !chosen.only || kept.has(block));
    rowOf = new Map(rows.map((block, row) => [block, row]));
    if (!rows.length || !steps.length) { image = null; return; }
    image = document.createElement("canvas");
    image.width = steps.length;
    image.height = rows.length;
    const pixels = image.getContext("2d").createImageData(image.width, image.height);
    const buffer = new Uint32Array(pixels.data.buffer);
    const blank = pack(-1, UNUSED, false);
    rows.forEach((block, row) => {
      const cells = data.cells[block], dim = kept !== null && !kept.has(block), base = row * steps.length;
      buffer.fill(blank, base, base + steps.length);
      for (let i = 0; i < cells.length; i += 3) {
        const from = columnOf.get(cells[i]) ?? steps.length;
        const to = i + 3 < cells.length ? columnOf.get(cells[i + 3]) ?? steps.length : steps.length;
        buffer.fill(pack(cells[i + 2], cells[i + 1], dim), base + from, base + to);
      }
    });
    image.getContext("2d").putImageData(pixels, 0, 0);
  }

  /** Sizes: everything in view where that leaves cells large enough to point at. */
  function fit(everything) {
    const width = pool.clientWidth - GUTTER_LEFT - 2, height = MAX_HEIGHT - GUTTER_TOP;
    cellWidth = Math.min(72, width / Math.max(1, steps.length));
    cellHeight = Math.min(24, height / Math.max(1, rows.length));
    if (!everything) [cellWidth, cellHeight] = [Math.max(1.5, cellWidth), Math.max(2, cellHeight)];
    layout();
  }

  function layout() {
    const width = GUTTER_LEFT + steps.length * cellWidth + 1, height = GUTTER_TOP + rows.length * cellHeight + 1;
    pool.style.height = `${Math.min(MAX_HEIGHT, Math.max(height, 80)) + 2}px`;
    byId("space").style.width = `${width}px`;
    byId("space").style.height = `${height}px`;
    const ratio = window.devicePixelRatio || 1;
    const [viewWidth, viewHeight] = [pool.clientWidth, pool.clientHeight];
    if (canvas.width !== viewWidth * ratio || canvas.height !== viewHeight * ratio) {
      canvas.width = viewWidth * ratio;
      canvas.height = viewHeight * ratio;
      canvas.style.width = `${viewWidth}px`;
      canvas.style.height = `${viewHeight}px`;
    }
    draw();
  }

  const xOf = (column) => GUTTER_LEFT + column * cellWidth - pool.scrollLeft;
  const yOf = (row) => GUTTER_TOP + row * cellHeight - pool.scrollTop;

  function draw() {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.width / ratio, height = canvas.height / ratio;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, height);
    if (!image) {
      context.fillStyle = "#667085";
      context.font = "13px system-ui, sans-serif";
      context.fillText("No block was used.", 16, 40);
      return;
    }
    const first = Math.floor(pool.scrollTop / cellHeight), last = Math.min(rows.length - 1, Math.ceil((pool.scrollTop + height) / cellHeight));
    const left = Math.floor(pool.scrollLeft / cellWidth), right = Math.min(steps.length - 1, Math.ceil((pool.scrollLeft + width) / cellWidth));
    context.save();
    context.beginPath();
    context.rect(GUTTER_LEFT, GUTTER_TOP, width - GUTTER_LEFT, height - GUTTER_TOP);
    context.clip();
    context.imageSmoothingEnabled = cellWidth < 1 || cellHeight < 1;
    context.drawImage(image, left, first, right - left + 1, last - first + 1,
      xOf(left), yOf(first), (right - left + 1) * cellWidth, (last - first + 1) * cellHeight);
    drawGrid(first, last, left, right, width, height);
    if (cellWidth >= 13 && cellHeight >= 11) drawLetters(first, last, left, right);
    drawWrong();
    drawChosen(width, height);
    context.restore();
    drawAxes(first, last, left, right, width, height);
  }

  function drawGrid(first, last, left, right, width, height) {
    context.fillStyle = "#fff";
    if (cellHeight >= 5) for (let row = first; row <= last + 1; row++) context.fillRect(GUTTER_LEFT, yOf(row) - 0.5, width, 1);
    if (cellWidth >= 5) for (let column = left; column <= right + 1; column++) context.fillRect(xOf(column) - 0.5, GUTTER_TOP, 1, height);
  }

  function drawLetters(first, last, left, right) {
    context.font = `600 ${Math.min(12, cellHeight - 2)}px ui-monospace, monospace`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let row = first; row <= last; row++) {
      for (const [step, kinds] of eventsBySteps(rows[row])) {
        const column = columnOf.get(step);
        if (column === undefined || column < left || column > right) continue;
        const letter = LETTERS.find(([kind]) => kinds.has(kind));
        if (!letter) continue;
        const [state] = stateAt(rows[row], step);
        const isDark = state === SHARED || (letter[0] === "wrong" && state === HELD);
        context.fillStyle = isDark ? "#fff" : letter[0] === "wrong" ? "#c0182b" : "#1d2430";
        context.fillText(letter[1], xOf(column) + cellWidth / 2, yOf(row) + cellHeight / 2 + 0.5);
      }
    }
  }

  function drawWrong() {
    context.strokeStyle = "#c0182b";
    context.lineWidth = 2.5;
    for (const [step, block] of data.focus.wrong) {
      const row = rowOf.get(block), column = columnOf.get(step);
      if (row === undefined || column === undefined) continue;
      const [x, y] = [xOf(column), yOf(row)];
      if (cellWidth >= 8 && cellHeight >= 8) context.strokeRect(x + 1, y + 1, cellWidth - 2, cellHeight - 2);
      else {
        context.beginPath();
        context.arc(x + cellWidth / 2, y + cellHeight / 2, 6, 0, 2 * Math.PI);
        context.stroke();
      }
    }
  }

  function drawChosen(width, height) {
    context.strokeStyle = "#1d2430";
    context.lineWidth = 1.5;
    const column = columnOf.get(chosen.step), row = rowOf.get(chosen.block);
    if (column !== undefined) context.strokeRect(xOf(column), GUTTER_TOP - 2, Math.max(cellWidth, 2), Math.min(height, yOf(rows.length) - GUTTER_TOP + 2));
    if (row !== undefined) context.strokeRect(GUTTER_LEFT - 2, yOf(row), Math.min(width, xOf(steps.length) - GUTTER_LEFT + 2), Math.max(cellHeight, 2));
  }

  function drawAxes(first, last, left, right, width, height) {
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, GUTTER_TOP);
    context.fillRect(0, 0, GUTTER_LEFT, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.max(1, Math.ceil(13 / cellHeight));
    for (let row = first; row <= last; row++) {
      const isChosen = rows[row] === chosen.block;
      if (row % every && !isChosen) continue;
      if (!isChosen && Math.abs(row - rowOf.get(chosen.block)) * cellHeight < 13) continue;
      const y = yOf(row) + cellHeight / 2;
      if (y < GUTTER_TOP + 4) continue;
      context.font = isChosen ? "700 11px system-ui, sans-serif" : "11px system-ui, sans-serif";
      context.fillStyle = isChosen ? "#1d2430" : "#667085";
      context.fillText(String(rows[row]), GUTTER_LEFT - 7, y);
    }
    context.textAlign = "center";
    const skip = Math.max(1, Math.ceil(34 / cellWidth));
    const labelX = (column) => Math.min(width - 12, xOf(column) + cellWidth / 2);
    const endX = right === steps.length - 1 ? labelX(right) : Infinity;
    for (let column = left; column <= right; column++) {
      const isChosen = steps[column] === chosen.step, isLast = column === steps.length - 1;
      if (!isChosen && !isLast && (column % skip || endX - labelX(column) < 26)) continue;
      if (!isChosen && Math.abs(column - columnOf.get(chosen.step)) * cellWidth < 22) continue;
      context.font = isChosen ? "700 11px system-ui, sans-serif" : "11px system-ui, sans-serif";
      context.fillStyle = isChosen ? "#1d2430" : "#667085";
      if (labelX(column) > GUTTER_LEFT) context.fillText(stepName(steps[column]), labelX(column), GUTTER_TOP / 2);
    }
    context.textAlign = "left";
    context.fillStyle = "#98a1b0";
    context.font = "10.5px system-ui, sans-serif";
    context.fillText("block", 8, GUTTER_TOP / 2);
  }

  /** {block, step} under the pointer, or null. */
  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    if (x < GUTTER_LEFT || y < GUTTER_TOP || !image) return null;
    const column = Math.floor((x - GUTTER_LEFT + pool.scrollLeft) / cellWidth);
    const row = Math.floor((y - GUTTER_TOP + pool.scrollTop) / cellHeight);
    return column < steps.length && row < rows.length ? { block: rows[row], step: steps[column] } : null;
  }

  function zoom(factor) {
    const [x, y] = [pool.scrollLeft / cellWidth, pool.scrollTop / cellHeight];
    cellWidth = Math.min(60, Math.max(0.5, cellWidth * factor));
    cellHeight = Math.min(32, Math.max(0.2, cellHeight * factor));
    layout();
    pool.scrollTo(x * cellWidth, y * cellHeight);
  }

  function scrollIntoView() {
    const row = rowOf.get(chosen.block), column = columnOf.get(chosen.step);
    if (row !== undefined && (yOf(row) < GUTTER_TOP || yOf(row) + cellHeight > pool.clientHeight)) {
      pool.scrollTop = row * cellHeight - (pool.clientHeight - GUTTER_TOP) / 2;
    }
    if (column !== undefined && (xOf(column) < GUTTER_LEFT || xOf(column) + cellWidth > pool.clientWidth)) {
      pool.scrollLeft = column * cellWidth - (pool.clientWidth - GUTTER_LEFT) / 2;
    }
  }

  // -------------------------------------------------------------------------------------------------------------- tip

  const tip = byId("tip");
  function showTip(event) {
    const cell = cellAt(event);
    tip.hidden = cell === null;
    if (cell === null) return;
    const [state, owner] = stateAt(cell.block, cell.step);
    const whose = state === UNUSED || owner < 0 ? "" : state === FREE ? `, was ${requestName(owner)}'s` : `, ${requestName(owner)}'s tokens`;
    const lines = [`Block ${cell.block}, ${cell.step > lastStep ? "at the end" : `step ${cell.step}`}: ${STATE_WORDS[state]}${whose}`];
    for (const [from, to, , words] of data.lives[cell.block] || []) if (from <= cell.step && cell.step <= to) lines.push(words);
    tip.textContent = lines.slice(0, 9).join("\n");
    const width = tip.offsetWidth, height = tip.offsetHeight;
    tip.style.left = `${event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - height - 8)}px`;
  }

  // ------------------------------------------------------------------------------------------------------------ panels

  function showBlock() {
    const block = chosen.block, life = byId("life");
    life.replaceChildren();
    if (block === null) return;
    const [state, owner] = stateAt(block, chosen.step);
    byId("block-title").textContent = `Block ${block}`;
    const when = chosen.step > lastStep ? "At the end" : `In step ${chosen.step}`;
    byId("block-state").textContent = `${when}: ${STATE_WORDS[state]}${state !== UNUSED && owner >= 0 ? `; ${requestName(owner)}'s tokens` : ""}`;
    let now = null;
    for (const [from, to, kind, words] of data.lives[block] || []) {
      const isNow = from <= chosen.step && chosen.step <= to;
      const name = from === to ? `step ${from}` : `steps ${from}..${to}`;
      const item = make("li", { class: `${KIND_NAMES[kind]}${isNow ? " now" : ""}` },
        make("a", { href: `#step-${from}`, text: name }), make("span", { text: words }));
      if (isNow && now === null) now = item;
      life.append(item);
    }
    if (now !== null) byId("block").scrollTop = now.offsetTop - 130;
    else byId("block").scrollTop = 0;
  }

  function showStep() {
    const step = chosen.step;
    byId("step-title").textContent = step > lastStep ? "At the end" : `Step ${step}`;
    const free = data.free[step];
    byId("step-words").textContent = (data.timeline[step] || (step > lastStep ? "Nothing is in flight." : "nothing"))
      + (free === undefined ? "" : `. ${free} of ${data.numBlocks - 1} blocks free.`);
    byId("lookups").replaceChildren(...(data.lookups[step] || [])
      .filter(([request]) => chosen.request < 0 || request === data.requests[chosen.request]).map(lookupElement));
    const requests = shownRequests(step), shown = requests.slice(0, MOST_REQUESTS);
    byId("tables").replaceChildren(...shown.flatMap((request) => tableElements(request, step)));
    if (requests.length > shown.length) {
      byId("tables").append(make("p", { class: "quiet", text: `${requests.length - shown.length} more requests hold blocks; choose one above the map.` }));
    }
  }

  function lookupElement([request, words, groups]) {
    const element = make("div", { class: "lookup" }, make("p", { text: `Lookup of ${request}: ${words}` }));
    for (const [group, alone, part, limits] of groups) {
      if (chosen.group >= 0 && group !== chosen.group) continue;
      element.append(make("p", { class: limits ? "limits" : "quiet", text: `group ${group}: ${alone} tokens alone; ${part}` }));
    }
    return element;
  }

  /** The requests whose tables are shown: the filtered one, else those that the finding is about, else who has blocks. */
  function shownRequests(step) {
    if (chosen.request >= 0) return [chosen.request];
    const holding = data.requests.map((_, index) => index).filter((index) => tablesAt(index, step) !== null);
    const first = data.focus.requests.filter((index) => holding.includes(index));
    return [...first, ...holding.filter((index) => !first.includes(index))];
  }

  function tableElements(request, step) {
    const tables = tablesAt(request, Math.min(step, lastStep));
    if (tables === null) return chosen.request < 0 ? [] : [make("p", { class: "quiet", text: `${requestName(request)} holds no blocks.` })];
    return tables.map((table, group) => [table, group])
      .filter(([, group]) => chosen.group < 0 || group === chosen.group)
      .map(([table, group]) => tableElement(request, group, table, step));
  }

  function tableElement(request, group, table, step) {
    const { kind, size } = data.groups[group];
    const marks = data.marks[`${step} ${request} ${group}`] || [];
    const markOf = new Map(marks.filter(([position]) => position !== null).map((mark) => [mark[0], mark]));
    const chips = make("div", { class: "chips" });
    for (let position = 0; position < table.length; position++) {
      const first = position;
      if (table[position][0] === 0) while (position + 1 < table.length && table[position + 1][0] === 0) position++;
      chips.append(table[position][0] === 0 ? nullElement(first, position, table[first], markOf.get(first)) : chipElement(table[position], position, size, step, markOf.get(position)));
    }
    fold(chips);
    const element = make("div", { class: "table" },
      make("h3", { text: `${requestName(request)}, group ${group} ` }, make("small", { text: `${kind}, ${size} token${size > 1 ? "s" : ""} a block, ${table.length} position${table.length === 1 ? "" : "s"}` })), chips);
    const verdicts = make("ul", { class: "verdicts" });
    for (const run of runsOf(marks)) verdicts.append(verdictElement(run));
    if (marks.length) element.append(verdicts);
    return element;
  }

  /** Null entries that follow each other. */
  function nullElement(first, last, [, origin], mark) {
    const place = first === last ? `position ${first}` : `positions ${first}..${last}`;
    const count = last - first + 1;
    return make("span", { class: `chip null${mark && mark[4] ? " wrong" : ""}`, text: count > 1 ? `null \u00d7 ${count}` : "null", title: `${place}: ${origin >= 0 ? data.texts[origin] : "null"}` });
  }

  function chipElement(entry, position, size, step, mark) {
    const [block, origin] = entry, [state, owner] = stateAt(block, step);
    const verdict = mark && mark[3] ? (mark[4] ? " wrong" : " right") : "";
    const chip = make("button", {
      type: "button", class: `chip${state === SHARED ? " shared" : ""}${verdict}${block === chosen.block ? " chosen" : ""}`, text: String(block),
      title: `position ${position}, tokens [${position * size}, ${(position + 1) * size})${origin >= 0 ? `: ${data.texts[origin]}` : ""}${mark && mark[3] ? `; ${mark[3]}` : ""}`,
      click: () => choose({ block, step }),
    });
    chip.style.background = css(hsl(owner, state === SHARED ? HELD : CACHED));
    return chip;
  }

  /** Long tables show their ends; what is marked stays. */
  function fold(chips) {
    const all = [...chips.children];
    if (all.length <= 3 * FOLD_AT) return;
    const hidden = all.slice(FOLD_AT, -FOLD_AT).filter((chip) => !/wrong|right|chosen/.test(chip.className));
    hidden.forEach((chip) => { chip.hidden = true; });
    const more = make("button", { type: "button", class: "chip more", text: `${hidden.length} more`, click: () => { hidden.forEach((chip) => { chip.hidden = false; }); more.remove(); } });
    all[FOLD_AT - 1].after(more);
  }

  /** Marked entries that follow each other and say the same. */
  function runsOf(marks) {
    const runs = [];
    for (const mark of marks) {
      const last = runs[runs.length - 1], before = last && last[last.length - 1];
      if (before && before[3] === mark[3] && String(before[2]) === String(mark[2]) && (mark[0] === null) === (before[0] === null)) last.push(mark);
      else runs.push([mark]);
    }
    return runs;
  }

  function verdictElement(run) {
    const [position, block, [expected, selected, received, written], verdict, isWrong, origin] = run[0];
    const plural = run.length > 1 ? "s" : "";
    const place = position === null ? "" : ` position${plural} ${runsOfNumbers(run.map((mark) => mark[0]))}`;
    const blocks = block === 0 ? "" : `${place ? "," : ""} block${plural} ${runsOfNumbers(run.map((mark) => mark[1]))}`;
    const said = [[expected, "expected"], [selected, "selected"], [received, "received"], [written, "written"]];
    const words = said.filter(([value]) => value !== null).map(([value, name]) => (value ? name : `not ${name}`)).join(", ");
    return make("li", { class: isWrong ? "wrong" : "fine" }, make("b", { text: verdict || "untouched" }),
      `${place}${blocks}${origin ? ` (${origin})` : ""}: ${words}`);
  }

  /** `1..101, 103`, in the given order. */
  function runsOfNumbers(numbers) {
    const runs = [];
    for (const number of numbers) {
      const last = runs[runs.length - 1];
      if (last && number === last[1] + 1) last[1] = number;
      else runs.push([number, number]);
    }
    return runs.map(([first, last]) => (first === last ? `${first}` : `${first}..${last}`)).join(", ");
  }

  let nowLink = null;
  const linkOf = new Map();
  function showTimeline() {
    if (nowLink) nowLink.classList.remove("now");
    nowLink = linkOf.get(chosen.step) || null;
    if (!nowLink) return;
    nowLink.classList.add("now");
    const box = byId("steps");
    if (nowLink.offsetTop < box.scrollTop + 40 || nowLink.offsetTop > box.scrollTop + box.clientHeight - 40) box.scrollTop = nowLink.offsetTop - box.clientHeight / 2;
  }

  /** Takes a new block or step and shows it everywhere. */
  function choose(change) {
    const isNewStep = shownStep !== change.step;
    Object.assign(chosen, change);
    scrollIntoView();
    draw();
    showBlock();
    if (isNewStep) showTimeline();
    if (isNewStep) showStep();
    else for (const chip of byId("tables").querySelectorAll(".chip")) chip.classList.toggle("chosen", chip.textContent === String(chosen.block));
    shownStep = chosen.step;
    history.replaceState(null, "", `#step-${chosen.step}${chosen.block === null ? "" : `-block-${chosen.block}`}`);
  }

  function readHash() {
    const match = /^#step-(\d+)(?:-block-(\d+))?$/.exec(location.hash);
    if (!match || !columnOf.has(Number(match[1]))) return false;
    choose(match[2] ? { step: Number(match[1]), block: Number(match[2]) } : { step: Number(match[1]) });
    return true;
  }

  function filter() {
    chosen.request = Number(byId("request").value);
    chosen.group = Number(byId("group").value);
    chosen.only = byId("only").checked;
    rebuild();
    fit(false);
    showStep();
  }

  // ------------------------------------------------------------------------------------------------------------- start

  function fill() {
    byId("request").append(make("option", { value: -1, text: "all" }), ...data.requests.map((name, index) => make("option", { value: index, text: name })));
    byId("group").append(make("option", { value: -1, text: "all" }), ...data.groups.map(({ kind }, index) => make("option", { value: index, text: `${index} ${kind}` })));
    for (const step of data.steps) {
      const link = make("a", { href: `#step-${step}`, class: step === data.focus.step ? "focus" : undefined },
        make("b", { text: step }), make("span", { text: data.timeline[step] || "nothing" }));
      linkOf.set(step, link);
      byId("timeline").append(make("li", {}, link));
    }
    const shades = (state) => `linear-gradient(90deg, ${HUES.slice(0, 3).map((_, i) => css(hsl(i, state))).join(", ")})`;
    const coloured = (colour, words) => make("span", {}, Object.assign(make("i"), { style: `background:${colour}` }), words);
    const swatch = (state, words) => coloured(state === UNUSED || state === FREE ? css(hsl(0, state)) : shades(state), words);
    byId("legend").append(swatch(HELD, "held, in the colour of whose tokens it holds"), swatch(SHARED, "shared"), swatch(CACHED, "free, can still be hit"), swatch(FREE, "free"), swatch(UNUSED, "never used"),
      ...LETTERS.map(([, letter, words]) => make("span", {}, make("b", { text: letter }), words)));
    const hidden = data.numBlocks - 1 - used.length;
    if (hidden) byId("legend").append(make("span", { text: `${hidden} blocks that were never used are not shown` }));
    if (data.requests.length <= 8) byId("legend").prepend(...data.requests.map((name, index) => coloured(css(hsl(index, HELD)), name)));
  }

  function listen() {
    canvas.addEventListener("mousemove", showTip);
    canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
    canvas.addEventListener("click", (event) => {
      const cell = cellAt(event);
      if (cell !== null) choose(cell);
      afterPaint((now) => { document.body.dataset.clickMs = (now - event.timeStamp).toFixed(1); });
    });
    pool.addEventListener("scroll", draw);
    pool.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2);
    }, { passive: false });
    pool.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (move) {
        const row = (rowOf.get(chosen.block) ?? 0) + move[0], column = columnOf.get(chosen.step) + move[1];
        if (rows[row] !== undefined && steps[column] !== undefined) choose({ block: rows[row], step: steps[column] });
      } else if (event.key === "+" || event.key === "=") zoom(1.4);
      else if (event.key === "-") zoom(1 / 1.4);
      else return;
      event.preventDefault();
    });
    for (const id of ["request", "group", "only"]) byId(id).addEventListener("change", filter);
    byId("in").addEventListener("click", () => zoom(1.4));
    byId("out").addEventListener("click", () => zoom(1 / 1.4));
    byId("fit").addEventListener("click", () => fit(true));
    byId("previous").addEventListener("click", () => move(-1));
    byId("next").addEventListener("click", () => move(1));
    window.addEventListener("hashchange", readHash);
    window.addEventListener("resize", layout);
  }

  /** Calls back with the time at which what was just drawn is on the screen; both promises of speed are measured so. */
  function afterPaint(callback) {
    requestAnimationFrame(() => { const channel = new MessageChannel(); channel.port1.onmessage = () => callback(performance.now()); channel.port2.postMessage(0); });
  }

  function move(by) {
    const step = steps[columnOf.get(chosen.step) + by];
    if (step !== undefined) choose({ step });
  }

  fill();
  listen();
  rebuild();
  fit(false);
  if (!readHash()) {
    const wrong = data.focus.wrong.find(([step, block]) => step === data.focus.step && rowOf.has(block));
    choose({ step: columnOf.has(data.focus.step) ? data.focus.step : steps[0], block: wrong ? wrong[1] : chosen.block });
  }
  afterPaint((now) => { document.body.dataset.drawMs = now.toFixed(1); });
})();
