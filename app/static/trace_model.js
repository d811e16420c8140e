// What the page knows of the trace: records as they came, and what can be told of any instant.

export const SEGMENTS = ["weights", "kv", "workspace", "repack", "graph", "io", "other"];

export function segmentOf(tag) {
  const name = tag.split("/", 1)[0];
  return SEGMENTS.includes(name) ? name : "other";
}

// A pattern as /debug/alloc reads it: a beginning, or a glob where it has one of * ? [ in it.
export function tagMatcher(pattern) {
  if (!pattern) return () => true;
  if (!/[*?[]/.test(pattern)) return (tag) => tag.startsWith(pattern);
  let source = "";
  for (let i = 0; i < pattern.length; i++) {
    const letter = pattern[i];
    const end = letter === "[" ? pattern.indexOf("]", i + 2) : -1;
    if (letter === "*") source += ".*";
    else if (letter === "?") source += ".";
    else if (end > 0) {
      source += "[" + pattern.slice(i + 1, end).replace(/^!/, "^").replace(/\\/g, "\\\\") + "]";
      i = end;
    } else source += letter.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  }
  const expression = new RegExp(`^(?:${source})$`, "s");
  return (tag) => expression.test(tag);
}

export class TraceModel {
  constructor(capacity = 65536) {
    this.capacity = capacity;
    this.clear();
  }

  clear() {
    this.records = [];
    this.lowest = null;
    this.failures = 0;
  }

  add(record) {
    const last = this.records[this.records.length - 1];
    // Whoever resumes may get a record twice; one that was running comes later than its place.
    if (record.index && last && record.index <= last.index) {
      let place = this.records.length;
      while (place > 0 && this.records[place - 1].index > record.index) place--;
      if (place > 0 && this.records[place - 1].index === record.index) {
        this.records[place - 1] = record;
        return;
      }
      this.records.splice(place, 0, record);
    } else this.records.push(record);
    if (record.kind === "failed") this.failures++;
    if (record.free !== null && (record.kind === "alloc" || record.kind === "free")) {
      if (this.lowest === null || record.free < this.lowest.free) this.lowest = record;
    }
    if (this.records.length > this.capacity + 4096) this.records.splice(0, this.records.length - this.capacity);
  }

  // Blocks live after record number `place`, by their allocation's number.
  liveAt(place) {
    const live = new Map();
    for (let i = 0; i <= place && i < this.records.length; i++) {
      const record = this.records[i];
      if (record.kind === "alloc") live.set(record.sequence, record);
      else if (record.kind === "free") live.delete(record.sequence);
    }
    return live;
  }

  // Points to draw, about `most` of them: of each run of records the ends, the extremes and all failures.
  points(most = 1500) {
    const count = this.records.length;
    const size = Math.max(1, Math.ceil(count / most));
    const totals = Object.fromEntries(SEGMENTS.map((name) => [name, 0]));
    const points = [];
    const point = (record) => ({
      time: new Date(record.wall_ns / 1e6), live: record.live, free: record.free,
      reserved: record.pool_reserved, segments: { ...totals }, record,
    });
    for (let begin = 0; begin < count; begin += size) {
      let highest = null;
      let last = null;
      for (const record of this.records.slice(begin, begin + size)) {
        if (record.kind === "gap") points.push(null);
        else if (record.kind === "alloc" || record.kind === "free") {
          totals[segmentOf(record.tag)] += record.kind === "alloc" ? record.size : -record.size;
          last = record;
          if (highest === null || record.live > highest.live) highest = point(record);
        } else if (record.kind === "failed") points.push(point(record));
      }
      if (highest) points.push(highest);
      if (last && last !== highest.record) points.push(point(last));
    }
    return points;
  }
}
