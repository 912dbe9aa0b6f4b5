// Lays out a small graph beside the page's own thread.

import { Graph, layout } from "@dagrejs/dagre";

interface Request {
  id: number;
  nodes: { id: string; width: number; height: number }[];
  edges: [string, string][];
}

onmessage = ({ data }: MessageEvent<Request>) => {
  const graph = new Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 14, ranksep: 26, marginx: 8, marginy: 8 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const { id, width, height } of data.nodes) graph.setNode(id, { width, height });
  for (const [from, to] of data.edges) graph.setEdge(from, to);
  layout(graph);
  const { width, height } = graph.graph() as { width: number; height: number };
  postMessage({
    id: data.id,
    width,
    height,
    nodes: Object.fromEntries(data.nodes.map(({ id }) => [id, [graph.node(id).x, graph.node(id).y]])),
    edges: data.edges.map(([from, to]) => (graph.edge(from, to) as { points: unknown }).points),
  });
};
